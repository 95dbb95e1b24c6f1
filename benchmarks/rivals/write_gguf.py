"""A GGUF file of a Qwen3 folder in bf16, without a tokenizer: write_gguf.py FOLDER FILE"""

import json
import sys
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file


def main():
    folder, file = Path(sys.argv[1]), sys.argv[2]
    c = json.loads((folder / "config.json").read_text())
    w = gguf.GGUFWriter(file, c["model_type"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_vocab_size(c["vocab_size"])
    w.add_tokenizer_model("none")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, c["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        target = names.get_name(name, try_suffixes=(".weight",))
        if tensor.ndim == 1:  # llama.cpp wants norms in fp32
            w.add_tensor(target, tensor.float().numpy())
        else:
            bits = tensor.view(torch.uint16).numpy()
            w.add_tensor(target, bits.view("uint8"), raw_dtype=gguf.GGMLQuantizationType.BF16)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


main()
