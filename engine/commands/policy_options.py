"""The options that choose a checkpoint policy and its budgets; shared by every command, free of torch.

An override lowers what the kernel can do, it never raises it. What contradicts itself is refused.
"""

import argparse
from collections.abc import Callable
from typing import Any

from scheduler.checkpoint_policy import (
    DECLARED_DRAFT_ARCHITECTURE,
    MANY,
    PRESETS,
    Capability,
    Policy,
    make_policy,
)

EXPORTS = {"0": 0, "1": 1, "many": MANY}
CHUNK_ENDS = ("floored", "free")
DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS = 3, 7
FILINGS = ("token", "drop", "key", "tag", "off")
AXES = (
    "policy", "retain", "exports", "chunk_ends", "draft_filing", "block_size", "max_batched_tokens",
)  # fmt: skip
Convert = Callable[[str], Any]


def at_least(least: int, most: int | None = None) -> Convert:
    """An argument type: integers from `least` up, to `most` if there is one."""
    expected = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}")
        return number

    return convert


def one_of(*names: str) -> Convert:
    """An argument type: one of the names."""

    def convert(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r}, expected one of {', '.join(names)}")
        return text

    return convert


def listed(convert: Convert, separator: str) -> Convert:
    """An argument type: a list of another type."""
    return lambda text: [convert(part.strip()) for part in text.split(separator)]


def add_policy_arguments(parser: argparse.ArgumentParser, *, axes: bool = False) -> None:
    """`--policy`, what overrides it, and budgets. `axes`: those of AXES take lists (`--retain` divides by `/`)."""
    group = parser.add_argument_group("checkpoint policy (scheduler/checkpoint_policy.py)")

    def add(flag: str, convert: Convert, metavar: str, text: str, default: Any = None) -> None:
        separator = "/" if flag == "--retain" else ","
        if axes:
            convert, metavar = listed(convert, separator), f"{metavar}{separator}.."
            default = None if flag == "--policy" else [default]
        group.add_argument(flag, type=convert, metavar=metavar, help=text, default=default)

    presets = f"preset: {', '.join(PRESETS)} (default: {'all' if axes else 'ours'})"
    add("--policy", one_of(*PRESETS), "NAME", presets, "ours")
    add("--retain", str, "LIST", "boundaries that deserve a slot, e.g. resend,junction; or none")
    add("--exports", one_of(*EXPORTS), "N", "states a forward may export: 0, 1, many")
    add("--chunk-ends", one_of(*CHUNK_ENDS), "WHERE", "a chunk may end inside a block: free; or not: floored")
    add("--draft-filing", one_of(*FILINGS), "HOW", "token, or by the hidden state: drop, key, tag, off")
    add("--block-size", at_least(1), "N", "tokens (default: 64; public presets: 512)")
    add("--max-batched-tokens", at_least(1), "N", "step budget (default: 4096)", 4096)
    fixed = group.add_argument
    fixed("--mixed-prefill-tokens", type=at_least(0), default=1024, metavar="N",
          help="prefill beside decodes, per step; 0: no cap (default: 1024)")  # fmt: skip
    fixed("--kv-tokens", type=at_least(1), metavar="N",
          help="per attention group (default: by free memory; without a model plenty)")  # fmt: skip
    fixed("--checkpoint-slots", type=at_least(0), metavar="N",
          help="beyond those of running requests (default: 32; without a model plenty)")  # fmt: skip
    fixed("--no-prefix-cache", action="store_true", help="publish and reuse nothing")


def policy_from(args: Any, capability: Capability, draft_architecture: str | None) -> Policy:
    """The policy that parsed arguments, or EngineOptions, describe, under what the kernel can do."""
    for name, allowed in (("exports", tuple(EXPORTS)), ("chunk_ends", CHUNK_ENDS)):
        if (value := getattr(args, name)) not in (None, *allowed):
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")
    if args.no_prefix_cache and args.retain is not None:
        raise ValueError("no_prefix_cache keeps no checkpoint and retain asks for some; leave one out")
    exports = MANY if args.exports is None else EXPORTS[args.exports]
    free = capability.free_chunk_ends and args.chunk_ends != "floored"
    return make_policy(
        "none" if args.no_prefix_cache else args.policy,
        Capability(min(capability.exports, exports), capability.export_grid, free),
        draft_architecture=draft_architecture,
        block_size=args.block_size,
        retain=None if args.retain is None else [name.strip() for name in args.retain.split(",")],
        filing=args.draft_filing,
    )


def sizes_from(args: argparse.Namespace, policy: Policy, kv_tokens: int, num_slots: int) -> dict[str, int]:
    """Sizes and budgets of a Simulation: `num_slots`, and `kv_tokens` where the arguments name none."""
    num_blocks = max((args.kv_tokens or kv_tokens) // policy.block_size, 1)
    budgets = {name: getattr(args, name) for name in ("max_batched_tokens", "mixed_prefill_tokens")}
    return {"num_blocks": num_blocks, "num_slots": num_slots, **budgets}


def add_drafter_arguments(parser: argparse.ArgumentParser, *, axis: bool = False) -> None:
    """The drafter that is assumed where no model runs. `axis`: its depth is a list."""
    group = parser.add_argument_group("drafter")
    depth = at_least(0, MAX_DRAFT_TOKENS)
    convert, metavar = (listed(depth, ","), "N,..") if axis else (depth, "N")
    group.add_argument("--draft-tokens", type=convert, metavar=metavar, default=[None] if axis else None,
                       help="0: no drafter (default: 3)")  # fmt: skip
    others = (
        f"default: {DECLARED_DRAFT_ARCHITECTURE}; any other turns seed into generic, and can't file by token"
    )
    group.add_argument("--draft-architecture", metavar="NAME", help=others)


def assumed_drafter(args: argparse.Namespace) -> str | None:
    """The assumed drafter's architecture; None at depth 0."""
    return None if args.draft_tokens == 0 else args.draft_architecture or DECLARED_DRAFT_ARCHITECTURE
