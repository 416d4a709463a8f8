"""What `quantization_config` declares about each Linear, to be checked against the tensors found.

Three producers are known: `fp8`, `modelopt` and `compressed-tensors`; anything else is refused by name. Their
lists may spell a module as the checkpoint files do or as transformers' module tree does, with any prefix; an
entry covers a module when it names the module or one of its containers.
"""

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model.config import ConfigError, read_json

Format = Literal["plain", "nvfp4", "fp8_block", "mxfp8"]
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
# Not nn.Linear modules in transformers' tree, so no rule about Linears covers them.
NOT_A_LINEAR = re.compile(r"(embed_tokens|mlp\.gate|index_kpool_compress_gate)$")
MODELOPT_ALGOS: Mapping[str, Format] = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "MXFP8": "mxfp8",
    "FP8_PB_WO": "fp8_block",
}
EXPERT = re.compile(r"experts\.\d+\.")
CT_FORMATS: Mapping[str, Format] = {
    "nvfp4-pack-quantized": "nvfp4",
    "float-quantized": "fp8_block",
    "mxfp8-quantized": "mxfp8",
}
Matcher = Callable[[str], bool]


@dataclass(frozen=True)
class Declaration:
    """`ignored` modules are plain; others take the first matching rule; `default` None declares nothing."""

    ignored: Matcher
    rules: tuple[tuple[Matcher, Format], ...]
    default: Format | None

    def format_of(self, stem: str) -> Format | None:
        """Declared format of the Linear with canonical name `stem`; None where the config says nothing."""
        if self.ignored(stem) or NOT_A_LINEAR.search(stem):
            return "plain"
        return next((format for matches, format in self.rules if matches(stem)), self.default)


def parse_quantization(directory: Path, raw_config: Mapping[str, Any]) -> Declaration:
    """Read `quantization_config`, or a lone `hf_quant_config.json`. Raises ConfigError."""
    declared = raw_config.get("quantization_config")
    if declared is None and (directory / "hf_quant_config.json").exists():
        declared = read_json(directory / "hf_quant_config.json").get("quantization", {})
        declared = {"quant_method": "modelopt", "ignore": declared.get("exclude_modules", []), **declared}
    if declared is None:
        return Declaration(matcher([]), (), "plain")
    method = declared.get("quant_method")
    if method == "fp8":
        return Declaration(matcher(declared.get("modules_to_not_convert") or []), (), "fp8_block")
    if method == "modelopt":
        return _modelopt(declared)
    if method == "compressed-tensors":
        return _compressed_tensors(declared)
    raise ConfigError(
        f"config.json: quantization_config.quant_method is {method!r}; known are 'fp8', 'modelopt' and"
        " 'compressed-tensors'; use a checkpoint in one of these forms"
    )


def _modelopt(declared: Mapping[str, Any]) -> Declaration:
    ignored = matcher(declared.get("ignore") or [])
    algo = str(declared.get("quant_algo"))
    if algo != "MIXED_PRECISION":
        return Declaration(ignored, (), _known(MODELOPT_ALGOS, algo, "quant_algo"))
    layers: Mapping[str, Any] = declared.get("quantized_layers") or {}
    by_format: dict[Format, list[str]] = {}
    for name, entry in layers.items():
        format = _known(MODELOPT_ALGOS, str(entry.get("quant_algo")), f"quantized_layers {name}")
        by_format.setdefault(format, []).append(name)
    rules = tuple((matcher(names), format) for format, names in by_format.items())
    return Declaration(ignored, rules, "plain" if rules else None)


def _compressed_tensors(declared: Mapping[str, Any]) -> Declaration:
    rules = []
    for name, group in (declared.get("config_groups") or {}).items():
        format = _known(CT_FORMATS, str(group.get("format") or declared.get("format")), f"format of {name}")
        targets = group.get("targets") or []
        rules.append(((lambda stem: True) if "Linear" in targets else matcher(targets), format))
    return Declaration(matcher(declared.get("ignore") or []), tuple(rules), "plain")


def _known(formats: Mapping[str, Format], name: str, field: str) -> Format:
    if name not in formats:
        known = sorted(formats)
        raise ConfigError(f"config.json: quantization_config {field} is {name!r}; known are {known}")
    return formats[name]


def matcher(entries: Iterable[str]) -> Matcher:
    """Whether a canonical stem is covered by names, globs (`*`) or regular expressions (`re:`)."""
    names: set[str] = set()
    patterns = []
    by_expert = False
    for entry in entries:
        by_expert = by_expert or re.search(r"experts\\?\.\d", entry) is not None
        if entry.startswith("re:"):
            patterns.append(entry[3:])
        elif set(entry) & set("*?["):
            patterns += [fnmatch.translate(entry), fnmatch.translate(entry + ".*")]
        else:
            names.add(entry)
    pattern = re.compile("|".join(f"(?:{p})" for p in patterns)) if patterns else None

    @functools.cache
    def covers(stem: str) -> bool:
        return any(
            not names.isdisjoint(_dotted_runs(name))
            or (pattern is not None and pattern.match(name) is not None)
            for name in _spellings(stem)
        )

    # Thousands of experts share an answer unless an entry numbers them.
    return covers if by_expert else lambda stem: covers(EXPERT.sub("experts.0.", stem))


def _spellings(stem: str) -> list[str]:
    """Every full name that a list may use for the module."""
    stems = [stem]
    for part in ("f_a_proj", "f_b_proj"):
        if stem.endswith(f"self_attn.{part}"):
            stems.append(stem.replace(part, f"forget_gate.{part}"))
    expert = re.sub(r"experts\.\d+\.(?:gate|up)_proj$", "experts.gate_up_proj", stem)
    expert = re.sub(r"experts\.\d+\.down_proj$", "experts.down_proj", expert)
    if expert != stem:
        stems.append(expert)
    return [prefix + name for name in stems for prefix in PREFIXES]


def _dotted_runs(name: str) -> Iterable[str]:
    """All runs of whole segments: an entry may leave out a prefix and may name a container."""
    parts = name.split(".")
    return (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
