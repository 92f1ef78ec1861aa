"""Steps of scripts/check_finetune.sh: dialogues, answers, and comparisons with Python libraries that read candle-zero's files.

  check_finetune.py data FOLDER                         write dialogues.jsonl, questions.txt and answers.txt to FOLDER
  check_finetune.py judge ANSWERS GIVEN                 count the given answers that are right
  check_finetune.py logits MODEL ADAPTER MERGED OURS    compare the adapter in PEFT and the merged folder in transformers with candle-zero's logits
  check_finetune.py gguf MERGED FILE ...                compare GGUF files, read by gguf's reader, with the merged folder
"""
import json
import os
import random
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
LOGITS = 1e-4
# Merging rounds the weights once more.
MERGED = 5e-4
RIGHT = 0.9


def question(r):
    kind = r.randrange(5)
    if kind < 2:
        a, b = r.randrange(2, 21), r.randrange(2, 21)
        return f"What is {a} + {b}?", f"{a} + {b} = {a + b}."
    if kind < 4:
        b, a = sorted(r.sample(range(2, 21), 2))
        return f"Please take {b} away from {a}.", f"{a} - {b} = {a - b}."
    numbers = r.sample(range(10, 100), 3)
    return f"Sort these numbers: {', '.join(map(str, numbers))}", f"{', '.join(map(str, sorted(numbers)))}."


def data(folder):
    r = random.Random(20250101)
    held_out = {}
    while len(held_out) < 100:
        q, a = question(r)
        held_out[q] = a
    with open(f"{folder}/dialogues.jsonl", "w") as f:
        for _ in range(2500):
            messages = []
            while len(messages) < 14:
                q, a = question(r)
                if q not in held_out:
                    messages += [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
            f.write(json.dumps({"messages": messages}) + "\n")
    for name, lines in (("questions", held_out.keys()), ("answers", held_out.values())):
        with open(f"{folder}/{name}.txt", "w") as f:
            f.writelines(line + "\n" for line in lines)


def judge(answers, given):
    want, got = (open(path).read().splitlines() for path in (answers, given))
    if len(want) != len(got):
        sys.exit(f"{len(got)} answer lines for {len(want)} questions")
    right = sum(a == b for a, b in zip(want, got))
    for a, b in zip(want, got):
        if a != b:
            print(f"  wrong: {b!r}, right: {a!r}")
    print(f"{right} of {len(want)} held-out questions are answered correctly")
    if right < RIGHT * len(want):
        sys.exit(f"fewer than {RIGHT:.0%} are correct")


def logits(model, adapter, merged, ours):
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = load_file(ours)

    def max_distance(network, kind):
        with torch.no_grad():
            rows = (k for k in ours if k.startswith("ids."))
            return max(float((network(input_ids=ours[k].long()).logits - ours[f"{kind}.{k[4:]}"]).abs().max()) for k in rows)

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, adapter).eval()
    in_f32 = max_distance(adapted, "adapter")
    # In f32, logits as large as 46 deviate by 1e-4 from the exact ones, both in torch and in candle-zero. It is therefore enough
    # that they agree with PEFT's logits in f32 or in f64.
    in_f64 = max_distance(adapted.double(), "adapter")
    merged_distance = max_distance(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64), "adapter")
    tokenizer = AutoTokenizer.from_pretrained(merged)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What is 7 + 8?"}], tokenize=False, add_generation_prompt=True)
    assert tokenizer(text)["input_ids"] == AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    change = max(float((ours[k] - ours["base" + k[7:]]).abs().max()) for k in ours if k.startswith("adapter."))
    print(f"logits differ by at most {in_f64:.1e} from PEFT in f64 ({in_f32:.1e} in f32), {merged_distance:.1e} from the merged folder in f64")
    print(f"the adapter changes logits by up to {change:.1f}")
    if min(in_f32, in_f64) > LOGITS or merged_distance > MERGED or change < 1:
        sys.exit(f"the logits differ by more than {LOGITS} (adapter) or {MERGED} (merged folder), or the adapter has no effect")


def gguf(merged, files):
    import numpy as np
    from gguf import MODEL_ARCH, MODEL_TENSORS, MODEL_TENSOR, GGUFReader, dequantize, get_tensor_name_map
    from safetensors.numpy import load_file

    config = json.load(open(f"{merged}/config.json"))
    weights = load_file(f"{merged}/model.safetensors")
    tokenizer = json.load(open(f"{merged}/tokenizer.json"))
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    for path in files:
        reader = GGUFReader(path)
        field = lambda key: reader.fields[key].contents()
        for key, value in {
            "general.architecture": "llama",
            "llama.block_count": config["num_hidden_layers"],
            "llama.context_length": config["max_position_embeddings"],
            "llama.embedding_length": config["hidden_size"],
            "llama.feed_forward_length": config["intermediate_size"],
            "llama.attention.head_count": config["num_attention_heads"],
            "llama.attention.head_count_kv": config["num_key_value_heads"],
            "llama.vocab_size": config["vocab_size"],
            "llama.rope.freq_base": theta,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.bos_token_id": config["bos_token_id"],
            "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        }.items():
            assert field(key) == value, (path, key, field(key), value)
        assert abs(field("llama.attention.layer_norm_rms_epsilon") / config["rms_norm_eps"] - 1) < 1e-6
        tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda token: token[1])
        assert field("tokenizer.ggml.tokens") == [token for token, _ in tokens], path
        merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
        assert field("tokenizer.ggml.merges") == merges, path
        assert "<|im_start|>" in field("tokenizer.chat_template")
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        seen, max_error = set(), 0.0
        for name, weight in weights.items():
            theirs = names.get_name(name, try_suffixes=(".weight",))
            assert theirs in tensors, (path, name, theirs)
            seen.add(theirs)
            tensor = tensors[theirs]
            assert [int(n) for n in reversed(tensor.shape)] == list(weight.shape), (path, theirs)
            read = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(weight.shape)
            kind = name.split(".")[-2]
            if kind in heads:
                rows, columns = weight.shape
                weight = weight.reshape(heads[kind], 2, rows // heads[kind] // 2, columns).swapaxes(1, 2).reshape(rows, columns)
            max_error = max(max_error, float(np.abs(read - weight).max() / np.abs(weight).max()))
        assert seen == set(tensors), (path, set(tensors) - seen)
        types = sorted({tensor.tensor_type.name for tensor in reader.tensors})
        limit = 5e-3 if "Q8_0" in types else 5e-4
        print(f"{os.path.basename(path)}: {len(seen)} tensors of {', '.join(types)}, largest error {max_error:.1e} of the largest weight")
        assert max_error < limit, path


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    if command == "gguf":
        gguf(words[0], words[1:])
    else:
        {"data": data, "judge": judge, "logits": logits}[command](*words)
