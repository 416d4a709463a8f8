"""llama.cpp on the same weights, in processes of its own: what it generates for token ids, and what it drafts.

    LLAMA_CPP_SRC=... python tests/peer.py convert HF_DIR MODEL.gguf
    python tests/peer.py complete MODEL.gguf DEPTH NUM_TOKENS < PROMPTS.json > COMPLETIONS.json

Every product and cache is float32, every choice the largest logit, and nothing ends a text before NUM_TOKENS.
"""

import json
import os
import sys
import urllib.request
from typing import Any

CONTEXT = 1024  # tokens; a prompt and what follows it must fit


def convert(directory: str, target: str) -> None:
    """Write a Hugging Face directory as GGUF with the converter of the source tree `LLAMA_CPP_SRC`."""
    source = os.environ["LLAMA_CPP_SRC"]
    sys.path[:0] = [source, f"{source}/gguf-py"]
    import convert_hf_to_gguf
    from conversion import base

    # It knows tokenizers by a hash of their output and refuses others. Only ids are exchanged here.
    for part in vars(base).values():
        if hasattr(part, "get_vocab_base_pre"):
            part.get_vocab_base_pre = lambda *_: "gpt-2"
    sys.argv[1:] = [directory, "--outfile", target, "--outtype", "f32"]
    convert_hf_to_gguf.main()


def server(model: str, depth: int) -> Any:
    """A running llama.cpp server that drafts `depth` tokens per step with the MTP layer."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.load_mtp, params.port = model, depth > 0, 0
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = CONTEXT, 1, 1
    params.warmup, params.fit_params, params.verbosity = False, False, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if depth:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        params.speculative.draft.n_max = depth
    return xllamacpp.Server(params)


def complete(address: str, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """One prompt's `tokens`, and how many drafts were `proposed` and `accepted` for them."""
    body = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "top_k": 1, "ignore_eos": True}
    body |= {"cache_prompt": False, "return_tokens": True}
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    timings = answer["timings"]
    drafts = {"proposed": timings.get("draft_n", 0), "accepted": timings.get("draft_n_accepted", 0)}
    return {"tokens": answer["tokens"]} | drafts


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:])
    else:
        running = server(sys.argv[2], int(sys.argv[3]))
        prompts, count = json.load(sys.stdin), int(sys.argv[4])
        print(json.dumps([complete(running.listening_address, prompt, count) for prompt in prompts]))
