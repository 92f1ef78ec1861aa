#!/usr/bin/env python3
"""Records the weights that reference implementations of optimizers reach, for tests/engine/recorded_optimizers.rs.

Adafactor is that of transformers, Schedule-Free AdamW is that of facebookresearch (package schedulefree), and LARS, which PyTorch
does not provide, is implemented here from its paper (arXiv 1708.03888, algorithm 1).

    python3 -m venv venv && venv/bin/pip install torch transformers schedulefree
    venv/bin/python scripts/record_optimizers.py > tests/fixtures/recorded_optimizers.json
"""

import json

import schedulefree
import torch
import transformers

SHAPES = {"w": [6, 5], "b": [7], "t": [2, 3, 4]}
STEPS = 20
RECORDED = [1, 2, 5, 10, 20]


def initial(k, i):
    return (2 * ((2741 * (i + 1) + 877 * (k + 1) + 13 * i * i) % 2001) - 2001) / 16384.0


def gradient(s, k, i):
    numerator = 2 * ((1103 * (i + 1) + 389 * s * (i + 3) + 617 * (k + 1) * s + 71 * i * i) % 1001) - 1001
    return numerator / 4096.0 * 2.0 ** (-3 * (i % 4))


def tensors(value):
    result = {}
    for k, (name, shape) in enumerate(SHAPES.items()):
        count = torch.Size(shape).numel()
        result[name] = torch.tensor([value(k, i) for i in range(count)], dtype=torch.float32).reshape(shape)
    return result


class Lars(torch.optim.Optimizer):
    """LARS as in algorithm 1 of its paper; a parameter or gradient of zeros has the trust ratio 1."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0, trust_coefficient=0.001, eps=1e-8, trust_ratio=True):
        super().__init__(
            params,
            dict(
                lr=lr,
                momentum=momentum,
                weight_decay=weight_decay,
                trust_coefficient=trust_coefficient,
                eps=eps,
                trust_ratio=trust_ratio,
            ),
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g, decay = p.grad, group["weight_decay"]
                norm, grad_norm = p.norm().item(), g.norm().item()
                ratio = 1.0
                if group["trust_ratio"] and norm > 0 and grad_norm > 0:
                    ratio = group["trust_coefficient"] * norm / (grad_norm + decay * norm + group["eps"])
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(g + decay * p, alpha=group["lr"] * ratio)
                p.sub_(buffer)


CASES = [
    ("LARS", Lars, dict(lr=2.0, weight_decay=0.01), dict(weight_decay=0.0, trust_ratio=False, lr=0.01)),
    ("LARS", Lars, dict(lr=0.5, momentum=0.5, trust_coefficient=0.02, eps=0.001), {}),
    ("Adafactor", transformers.Adafactor, dict(), {}),
    ("Adafactor", transformers.Adafactor, dict(warmup_init=True, weight_decay=0.1, scale_parameter=False), {}),
    (
        "Adafactor",
        transformers.Adafactor,
        dict(lr=0.01, relative_step=False, beta1=0.9, weight_decay=0.1, clip_threshold=0.5),
        dict(weight_decay=0.0, lr=0.02),
    ),
    (
        "Adafactor",
        transformers.Adafactor,
        dict(lr=0.01, relative_step=False, scale_parameter=False, decay_rate=-0.5, eps=[1e-6, 0.01]),
        {},
    ),
    ("AdamWScheduleFree", schedulefree.AdamWScheduleFree, dict(lr=0.01), {}),
    (
        "AdamWScheduleFree",
        schedulefree.AdamWScheduleFree,
        dict(lr=0.02, betas=[0.95, 0.99], weight_decay=0.1, warmup_steps=6, r=0.5),
        dict(weight_decay=0.0, lr=0.01),
    ),
]


def record(kind, optimizer, settings, of_vectors):
    params = {name: torch.nn.Parameter(tensor) for name, tensor in tensors(initial).items()}
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    groups = [dict(params=[params["w"], params["t"]]), dict(params=[params["b"]], **of_vectors)]
    optimizer = optimizer(groups, **arguments)
    averages = hasattr(optimizer, "train")
    steps = {}
    for step in range(1, STEPS + 1):
        if averages:
            optimizer.train()
        for name, grad in tensors(lambda k, i: gradient(step, k, i)).items():
            params[name].grad = grad
        optimizer.step()
        if step in RECORDED:
            values = lambda: {name: p.detach().flatten().tolist() for name, p in params.items()}
            steps[step] = {"trained": values()}
            if averages:
                optimizer.eval()
                steps[step]["averaged"] = values()
    return {"type": kind, "params": settings, "of_vectors": of_vectors, "steps": steps}


def main():
    torch.set_num_threads(1)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "schedulefree": "1.4.1"}
    print(json.dumps({"versions": versions, "shapes": SHAPES, "cases": [record(*case) for case in CASES]}, indent=1))


if __name__ == "__main__":
    main()
