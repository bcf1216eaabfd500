"""llama.cpp's own server (from the wheel xllamacpp) for an OLMo model in a folder, on loopback:
``llamacpp_server.py FOLDER PORT``; the model goes into a float32 GGUF file first."""

import json
import sys
import tempfile
import time
from pathlib import Path

import xllamacpp
from gguf import MODEL_ARCH, GGUFWriter, TokenType, get_tensor_name_map
from transformers import AutoModelForCausalLM, AutoTokenizer


def to_gguf(folder: str, out: str) -> None:
    """An OLMo model (rotary halves lie side by side there) and its byte-level BPE tokenizer."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    config, file = model.config, GGUFWriter(out, "olmo")
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_layer_norm_eps(1e-5)
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(tokenizer.convert_ids_to_tokens(range(config.vocab_size)))
    special = set(tokenizer.all_special_ids)
    kinds = (
        TokenType.CONTROL if i in special else TokenType.NORMAL for i in range(config.vocab_size)
    )
    file.add_token_types(list(kinds))
    file.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    file.add_eos_token_id(tokenizer.eos_token_id)
    names = get_tensor_name_map(MODEL_ARCH.OLMO, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = weight.unflatten(0, (config.num_attention_heads, 2, -1))
            weight = halves.transpose(1, 2).reshape(weight.shape)
        file.add_tensor(names.get_name(name, [".weight"]), weight.float().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


if __name__ == "__main__":
    folder, port = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = str(Path(tempfile.mkdtemp(), "model.gguf"))
    to_gguf(folder, params.model.path)
    params.hostnames, params.port, params.n_ctx = ["127.0.0.1"], int(port), 1024
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    while True:
        time.sleep(60)
