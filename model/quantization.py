"""What `quantization_config` declares about each Linear, to be checked against the tensors found.

Three producers are known: `fp8`, `modelopt` and `compressed-tensors`; anything else is refused by name. Their
lists may spell a module as the checkpoint files do or as transformers' module tree does, with any prefix; an
entry covers a module when it names the module or one of its containers.
"""

import fnmatch
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model.config import ConfigError, read_json, refusing_wrong_types

Format = Literal["plain", "nvfp4", "fp8_block", "mxfp8"]
# Of the text model, in files and lists; the first that fits is removed.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
# An entry that may tell one expert from another.
NUMBERED = re.compile(r"experts\\?\.(?!\\d\+|\[0-9\]\+|[*.a-z]|$)")
# Not nn.Linear modules in transformers' tree, so no rule about Linears covers them.
NOT_A_LINEAR = re.compile(r"(embed_tokens|mlp\.gate|index_kpool_compress_gate)$")
MODELOPT_ALGOS: Mapping[str, Format] = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "MXFP8": "mxfp8",
    "FP8_PB_WO": "fp8_block",
}
CT_FORMATS: Mapping[str, Format] = {
    "nvfp4-pack-quantized": "nvfp4",
    "float-quantized": "fp8_block",
    "mxfp8-quantized": "mxfp8",
}
Matcher = Callable[[str], bool]
Rule = tuple[Matcher, Format]


@dataclass(frozen=True)
class Declaration:
    """A module takes the format of the first rule that covers it; `default` None declares nothing."""

    rules: Sequence[Rule]
    default: Format | None

    def format_of(self, stem: str) -> Format | None:
        """Declared format of the Linear with canonical name `stem`; None where the config says nothing."""
        if NOT_A_LINEAR.search(stem):
            return "plain"
        return next((format for covers, format in self.rules if covers(stem)), self.default)


@refusing_wrong_types("config.json: quantization_config")
def parse_quantization(directory: Path, raw_config: Mapping[str, Any]) -> Declaration:
    """Read `quantization_config`, or a lone `hf_quant_config.json`. Raises ConfigError."""
    declared = raw_config.get("quantization_config")
    if declared is None and (directory / "hf_quant_config.json").exists():
        declared = read_json(directory / "hf_quant_config.json").get("quantization", {})
        declared = {"quant_method": "modelopt", "ignore": declared.get("exclude_modules", []), **declared}
    if declared is None:
        return Declaration((), "plain")
    method, rules = declared.get("quant_method"), list[Rule]()
    default: Format | None = "plain"
    if method == "fp8":
        default = "fp8_block"
    elif method == "compressed-tensors":
        rules = _compressed_tensors(declared)
    elif method == "modelopt" and declared.get("quant_algo") == "MIXED_PRECISION":
        rules = _mixed_precision(declared.get("quantized_layers") or {})
        default = "plain" if rules else None
    elif method == "modelopt":
        default = _known(MODELOPT_ALGOS, declared.get("quant_algo"), "quant_algo")
    else:
        known = "known are 'fp8', 'modelopt' and 'compressed-tensors'; use a checkpoint in one of these forms"
        raise ConfigError(f"config.json: quantization_config.quant_method is {method!r}; {known}")
    ignored = declared.get("modules_to_not_convert" if method == "fp8" else "ignore") or []
    return Declaration(((matcher(ignored), "plain"), *rules), default)


def _mixed_precision(layers: Mapping[str, Any]) -> list[Rule]:
    by_format: dict[Format, list[str]] = {}
    for name, entry in layers.items():
        format = _known(MODELOPT_ALGOS, entry.get("quant_algo"), f"quantized_layers {name}")
        by_format.setdefault(format, []).append(name)
    return [(matcher(names), format) for format, names in by_format.items()]


def _compressed_tensors(declared: Mapping[str, Any]) -> list[Rule]:
    rules = []
    for name, group in (declared.get("config_groups") or {}).items():
        format = _known(CT_FORMATS, group.get("format") or declared.get("format"), f"format of {name}")
        targets = group.get("targets") or []
        rules.append((matcher(["*"] if "Linear" in targets else targets), format))
    return rules


def _known(formats: Mapping[str, Format], name: Any, field: str) -> Format:
    if str(name) not in formats:
        known = sorted(formats)
        raise ConfigError(f"config.json: quantization_config {field} is {name!r}; known are {known}")
    return formats[name]


def matcher(entries: Collection[str]) -> Matcher:
    """Whether a canonical stem is covered by names, globs (`*`) or regular expressions (`re:`)."""
    names, patterns = set[str](), ["(?!)"]  # this one matches nothing
    for entry in entries:
        if entry.startswith("re:"):
            patterns.append(entry[3:])
        elif set(entry) & set("*?["):
            patterns += [fnmatch.translate(entry), fnmatch.translate(entry + ".*")]
        else:
            names.add(entry)
    pattern = re.compile("|".join(f"(?:{p})" for p in patterns))

    @functools.cache
    def covers(stem: str) -> bool:
        spellings = _spellings(stem)
        return any(pattern.match(name) or not names.isdisjoint(_dotted_runs(name)) for name in spellings)

    # Thousands of experts share an answer unless an entry numbers them.
    if any(map(NUMBERED.search, entries)):
        return covers
    return lambda stem: covers(re.sub(r"experts\.\d+\.", "experts.0.", stem))


def _spellings(stem: str) -> list[str]:
    """Every full name that a list may use for the module."""
    tree = re.sub(r"self_attn\.(f_[ab]_proj)$", r"self_attn.forget_gate.\1", stem)
    tree = re.sub(r"experts\.\d+\.(?:gate|up)_proj$", "experts.gate_up_proj", tree)
    tree = re.sub(r"experts\.\d+\.down_proj$", "experts.down_proj", tree)
    return [prefix + name for name in {stem, tree} for prefix in PREFIXES]


def _dotted_runs(name: str) -> Iterable[str]:
    """All runs of whole segments: an entry may leave out a prefix and may name a container."""
    parts = name.split(".")
    return (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
