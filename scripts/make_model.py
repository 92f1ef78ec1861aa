#!/usr/bin/env python3
"""make_model.py SIZE FOLDER TOKENIZER_FOLDER: writes a model folder in Hugging Face format with random weights in bf16.

SIZE is llama-3.2-1b, llama-2-7b, olmoe-1b-7b or qwen3-30b-a3b, or the path of a Llama's config.json. The tokenizer files are
copied. All weights come from one block of normally distributed random numbers (standard deviation 0.02), which is read from a
different offset for each tensor; norms are 1. Only the standard library is needed.
"""
import array, json, os, random, shutil, struct, sys

SIZES = {
    "llama-3.2-1b": dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072,
                         tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=500000.0,
                         rope_scaling=dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                           original_max_position_embeddings=8192)),
    "llama-2-7b": dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                       num_attention_heads=32, num_key_value_heads=32, head_dim=128, max_position_embeddings=4096,
                       tie_word_embeddings=False, rms_norm_eps=1e-5, rope_theta=10000.0),
    "olmoe-1b-7b": dict(architectures=["OlmoeForCausalLM"], model_type="olmoe", vocab_size=50304, hidden_size=2048,
                        intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16, head_dim=128,
                        max_position_embeddings=4096, tie_word_embeddings=False, rms_norm_eps=1e-5, rope_theta=10000.0,
                        num_experts=64, num_experts_per_tok=8, norm_topk_prob=False),
    "qwen3-30b-a3b": dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=151936, hidden_size=2048,
                          intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
                          num_key_value_heads=4, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False,
                          rms_norm_eps=1e-6, rope_theta=1000000.0, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True),
}
# The sizes of the norms of queries and keys, by model_type.
QUERY_KEY_NORMS = {"olmoe": lambda c: [c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]],
                   "qwen3_moe": lambda c: [c["head_dim"]] * 2}
COMMON = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", attention_bias=False,
              mlp_bias=False, attention_dropout=0.0, torch_dtype="bfloat16", bos_token_id=0, eos_token_id=0)
SHARD = 4 << 30
BLOCK = 1 << 20


def tensors(c):
    d, q = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
    kv, inner = c["num_key_value_heads"] * c["head_dim"], c["intermediate_size"]
    yield "model.embed_tokens.weight", [c["vocab_size"], d]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", [d]
        yield at + "post_attention_layernorm.weight", [d]
        for name, shape in [("q", [q, d]), ("k", [kv, d]), ("v", [kv, d]), ("o", [d, q])]:
            yield f"{at}self_attn.{name}_proj.weight", shape
        for name, width in zip("qk", QUERY_KEY_NORMS.get(c["model_type"], lambda _: [])(c)):
            yield f"{at}self_attn.{name}_norm.weight", [width]
        modules, width = [f"{at}mlp."], inner
        if "num_experts" in c:
            yield f"{at}mlp.gate.weight", [c["num_experts"], d]
            modules = [f"{at}mlp.experts.{expert}." for expert in range(c["num_experts"])]
            width = c.get("moe_intermediate_size", inner)
        for module in modules:
            for name, shape in [("gate", [width, d]), ("up", [width, d]), ("down", [d, width])]:
                yield f"{module}{name}_proj.weight", shape
    yield "model.norm.weight", [d]
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", [c["vocab_size"], d]


def size(shape):
    return 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)


def shards(c):
    """Returns lists of tensors, each with at most SHARD bytes in total."""
    groups, bytes_ = [[]], 0
    for name, shape in tensors(c):
        if groups[-1] and bytes_ + size(shape) > SHARD:
            groups.append([])
            bytes_ = 0
        groups[-1].append((name, shape))
        bytes_ += size(shape)
    return groups


def block():
    """Returns a block of random bf16 numbers twice in a row, so that reading may start at any offset."""
    random.seed(7)
    wide = array.array("f", (random.gauss(0.0, 0.02) for _ in range(BLOCK // 2)))
    narrow = wide.tobytes()
    narrow = b"".join([narrow[i + 2:i + 4] for i in range(0, len(narrow), 4)])
    return narrow + narrow


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    model, folder, tokenizer = sys.argv[1:]
    c = SIZES[model] if model in SIZES else json.load(open(model))
    c = {**COMMON, **c}
    os.makedirs(folder)
    for name in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]:
        if os.path.exists(os.path.join(tokenizer, name)):
            shutil.copy(os.path.join(tokenizer, name), folder)
    json.dump(c, open(os.path.join(folder, "config.json"), "w"), indent=2)
    values, ones, index, total = block(), struct.pack("<H", 0x3F80), {}, 0
    files = shards(c)
    for number, file in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        header, offset = {}, 0
        for tensor, shape in file:
            header[tensor] = dict(dtype="BF16", shape=shape, data_offsets=[offset, offset + size(shape)])
            index[tensor] = name
            offset += size(shape)
        total += offset
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(os.path.join(folder, name), "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for tensor, shape in file:
                remaining = size(shape)
                if len(shape) == 1:
                    out.write(ones * shape[0])
                    continue
                start = 2 * random.randrange(BLOCK // 2)
                while remaining:
                    piece = min(remaining, BLOCK)
                    out.write(values[start:start + piece])
                    remaining -= piece
    if len(files) > 1:
        index = dict(metadata=dict(total_size=total), weight_map=index)
        json.dump(index, open(os.path.join(folder, "model.safetensors.index.json"), "w"))
    print(f"{folder}: {total // 2} parameters, {total} bytes in {len(files)} files")


main()
