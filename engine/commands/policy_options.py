"""The options that choose a checkpoint policy; shared by every command, free of torch."""

import argparse
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
FILINGS = ("token", "drop", "key", "tag", "off")


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """`--policy` and what overrides it; overrides lower a capability, they never raise one."""
    group = parser.add_argument_group("checkpoint policy (scheduler/checkpoint_policy.py)")
    group.add_argument("--policy", choices=tuple(PRESETS), default="ours", help="preset (default: ours)")
    group.add_argument(
        "--retain", metavar="LIST", help="boundaries that deserve a slot, e.g. resend,junction"
    )
    group.add_argument("--exports", choices=tuple(EXPORTS), help="states a forward may export")
    group.add_argument("--chunk-ends", choices=("floored", "free"), help="may a chunk end inside a block?")
    group.add_argument(
        "--draft-filing", choices=FILINGS, help="all but token file a draft row by its hidden state"
    )
    group.add_argument(
        "--block-size", type=int, metavar="N", help="tokens (default: 64; public presets: 512)"
    )
    group.add_argument(
        "--max-batched-tokens", type=int, default=4096, metavar="N", help="step budget (default: 4096)"
    )
    group.add_argument("--mixed-prefill-tokens", type=int, default=1024, metavar="N",
                       help="prefill beside decodes, per step; 0: no cap (default: 1024)")  # fmt: skip
    group.add_argument("--no-prefix-cache", action="store_true", help="publish and reuse nothing")


def policy_from(args: Any, capability: Capability, draft_architecture: str | None) -> Policy:
    """The policy that parsed arguments, or EngineOptions, describe, under what the kernel can do."""
    exports = EXPORTS[args.exports] if args.exports else MANY
    free = args.chunk_ends != "floored"
    masked = Capability(
        min(capability.exports, exports), capability.export_grid, capability.free_chunk_ends and free
    )
    return make_policy(
        "none" if args.no_prefix_cache else args.policy,
        masked,
        draft_architecture=draft_architecture,
        block_size=args.block_size,
        retain=args.retain.split(",") if args.retain else None,
        filing=args.draft_filing,
    )


def add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    """The drafter that is assumed where no model is loaded."""
    group = parser.add_argument_group("drafter, where no model is loaded")
    group.add_argument("--draft-tokens", type=int, default=3, metavar="N", help="0: no drafter (default: 3)")
    group.add_argument("--draft-architecture", default=DECLARED_DRAFT_ARCHITECTURE, metavar="NAME",
                       help="one that declares nothing shows the fallback (default: %(default)s)")  # fmt: skip


def assumed_drafter(args: argparse.Namespace) -> str | None:
    """The assumed drafter's architecture; None at depth 0."""
    return args.draft_architecture if args.draft_tokens else None
