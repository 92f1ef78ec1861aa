#!/usr/bin/env python3
"""Records the reference of tests/local_steps with PyTorch: python3 scripts/record_local_steps.py > tests/fixtures/local_steps.json

Islands train copies of a small model with AdamW. A fragment's weights at its last exchange are the parameters of an outer
SGD. Its gradient is the difference between these parameters and the islands' weights, averaged over the islands.
"""
import json
import torch

SHAPES = [(8, 6), (8,), (3, 8), (3,)]
STEPS, WINDOWS, BATCH = 4, 5, 4


def values(shape, seed, scale):
    count = torch.Size(shape).numel()
    return (torch.tensor([(i * 37 + seed * 101) % 97 for i in range(count)]) / 97.0 - 0.5).reshape(shape) * scale


def loss_of(weights, step, island):
    x, target = values((BATCH, 6), step * 7 + island * 3 + 1, 2.0), values((BATCH, 3), step * 5 + island * 11 + 2, 1.0)
    hidden = torch.tanh(x @ weights[0].T + weights[1])
    return ((hidden @ weights[2].T + weights[3] - target) ** 2).mean()


def fragment_of_each(fragments):
    total, before, fragment_indexes = sum(torch.Size(s).numel() for s in SHAPES), 0, []
    for shape in SHAPES:
        count = torch.Size(shape).numel()
        fragment_indexes.append(min((2 * before + count) * fragments // (2 * total), fragments - 1))
        before += count
    return fragment_indexes


def run(islands, lr, momentum, nesterov, fragments=1, delay=0, alpha=0.0):
    start = [values(shape, number, 0.4) for number, shape in enumerate(SHAPES)]
    local = [[w.clone().requires_grad_() for w in start] for _ in range(islands)]
    inner = [torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1) for weights in local]
    outer = [w.clone().requires_grad_() for w in start]
    outer_steps = [torch.optim.SGD([w], lr=lr, momentum=momentum, nesterov=nesterov) for w in outer]
    fragment_indexes, in_flight, history, losses = fragment_of_each(fragments), {}, [], []
    for step in range(1, STEPS * WINDOWS + 1):
        for island in range(islands):
            inner[island].zero_grad()
            loss = loss_of(local[island], step, island)
            loss.backward()
            inner[island].step()
        losses.append(loss_of(local[0], step, 0).item())
        for fragment in range(fragments):
            if (step - 1) % STEPS + 1 == (fragment + 1) * STEPS // fragments:
                change = [torch.stack([outer[p].data - weights[p].data for weights in local]).mean(0) for p in range(4)]
                in_flight[step + delay] = (fragment, change)
        if step in in_flight:
            fragment, change = in_flight.pop(step)
            for p in range(4):
                if fragment_indexes[p] == fragment:
                    outer[p].grad = change[p]
                    outer_steps[p].step()
                    for weights in local:
                        weights[p].data = alpha * weights[p].data + (1 - alpha) * outer[p].data
        if step % STEPS == 0:
            history.append([[w.flatten().tolist() for w in weights] for weights in (outer, local[0])])
    settings = {"islands": islands, "outer_lr": lr, "outer_momentum": momentum, "nesterov": nesterov,
                "fragments": fragments, "fragment_delay": delay, "fragment_alpha": alpha}
    return {"settings": settings, "losses": losses, "windows": history}


if __name__ == "__main__":
    cases = [run(2, 0.7, 0.9, True), run(3, 0.7, 0.9, True), run(4, 1.0, 0.0, False), run(2, 0.5, 0.5, False),
             run(2, 0.7, 0.9, True, fragments=2), run(3, 0.7, 0.9, True, fragments=2, delay=1, alpha=0.25),
             run(2, 0.7, 0.9, True, fragments=3, delay=3, alpha=0.5)]
    print(json.dumps({"torch": torch.__version__, "steps": STEPS, "cases": cases}))
