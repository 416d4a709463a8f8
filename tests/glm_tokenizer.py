"""A tokenizer directory with the released special-token ids, the test template and one token per byte."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL_IDS = {
    "<|endoftext|>": 154820,
    "[gMASK]": 154822,
    "<sop>": 154824,
    "<|system|>": 154826,
    "<|user|>": 154827,
    "<|assistant|>": 154828,
    "<|observation|>": 154829,
    "<think>": 154841,
    "</think>": 154842,
    "<tool_call>": 154843,
    "</tool_call>": 154844,
}
TEMPLATE = Path(__file__).parent / "data" / "glm53_template.jinja"


def write_tokenizer(directory: Path, *, eos_token: object = "<|endoftext|>") -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Every byte is one token, only "th" is merged. The post-processor adds a second preamble for those who ask
    for special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate([*alphabet, "th"])} | SPECIAL_IDS
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_IDS))
    preamble = [(name, SPECIAL_IDS[name]) for name in ("[gMASK]", "<sop>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=preamble
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    shutil.copy(TEMPLATE, directory / "chat_template.jinja")
