#!/usr/bin/env python3
"""Records tests/fixtures/pytorch_layers.json with PyTorch on the CPU, in f64: values and gradients of convolution along one axis,
pooling, resampling, scattering and products of batches, of numbers by the rule of tests/nn/layers.rs.

usage: record_layers.py tests/fixtures/pytorch_layers.json
"""

import json
import math
import sys

import torch
import torch.nn.functional as F

MASK = 0xFFFFFFFF


def numbers(count, seed):
    """Numbers in [-1, 1), as `numbers` of tests/nn/layers.rs makes them."""
    values = []
    for i in range(count):
        x = ((i * 0x9E3779B1 + seed * 0x85EBCA77) & MASK) ^ 0x5A5A1234
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & MASK
        x = ((x ^ (x >> 12)) * 0x297A2D39) & MASK
        x ^= x >> 15
        values.append(torch.tensor(x, dtype=torch.float64).to(torch.float32).item() / 2**31)
    return torch.tensor(values, dtype=torch.float32) - 1.0


def rounded(tensor):
    return [round(value, 6) for value in tensor.detach().flatten().tolist()]


CASES = []


def case(op, shapes, function, **settings):
    """One layer: the loss is the sum of its result's elements, each with a weight."""
    wide = lambda shape, seed: numbers(math.prod(shape), seed).reshape(shape).to(torch.float64)
    args = [wide(shape, seed).requires_grad_(True) for seed, shape in enumerate(shapes)]
    y = function(*args)
    (y * wide(list(y.shape), 99)).sum().backward()
    CASES.append(
        dict(
            op=op,
            shapes=shapes,
            **settings,
            value_shape=list(y.shape),
            value=rounded(y),
            gradients=[rounded(arg.grad) for arg in args],
        )
    )


def convolutions():
    for x, w, stride, padding, dilation, groups, bias in [
        ([2, 3, 9], [4, 3, 3], 1, 1, 1, 1, True),
        ([2, 4, 10], [6, 2, 3], 2, 0, 1, 2, True),
        ([1, 2, 11], [2, 2, 4], 3, 2, 2, 1, False),
        ([2, 3, 7], [3, 1, 3], 1, 2, 1, 3, False),
    ]:
        settings = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
        shapes = [x, w] + ([[w[0]]] if bias else [])
        case("conv1d", shapes, lambda x, w, b=None: F.conv1d(x, w, b, **settings), **settings)
    for x, w, stride, padding, output_padding, dilation, groups, bias in [
        ([2, 3, 5], [3, 2, 3], 1, 0, 0, 1, 1, True),
        ([2, 4, 4], [4, 1, 3], 2, 1, 1, 1, 2, True),
        ([1, 2, 5], [2, 3, 4], 3, 2, 2, 2, 1, False),
    ]:
        settings = dict(
            stride=stride, padding=padding, output_padding=output_padding, dilation=dilation, groups=groups
        )
        shapes = [x, w] + ([[w[1] * groups]] if bias else [])
        case("conv_transpose1d", shapes, lambda x, w, b=None: F.conv_transpose1d(x, w, b, **settings), **settings)


def grids():
    image = [2, 2, 7, 5]
    for kernel, stride, padding in [
        ((2, 2), (2, 2), (0, 0)),
        ((2, 2), (2, 2), (1, 1)),
        ((3, 2), (1, 2), (1, 0)),
        ((3, 3), (2, 2), (1, 1)),
        ((1, 2), (3, 1), (0, 1)),
    ]:
        settings = dict(kernel=kernel, stride=stride, padding=padding)
        case("max_pool2d", [image], lambda x: F.max_pool2d(x, kernel, stride, padding), **settings)
        case("avg_pool2d", [image], lambda x: F.avg_pool2d(x, kernel, stride, padding), **settings)
    for size in [4, 10, 7, 13]:
        case("upsample_nearest1d", [[2, 2, 5]], lambda x: F.interpolate(x, size=size, mode="nearest"), size=[size])
    image = [2, 1, 3, 4]
    for size in [[6, 8], [7, 9], [2, 3], [3, 4]]:
        case("upsample_nearest2d", [image], lambda x: F.interpolate(x, size=size, mode="nearest"), size=size)
        for corners in [False, True]:
            bilinear = lambda x: F.interpolate(x, size=size, mode="bilinear", align_corners=corners)
            case("upsample_bilinear2d", [image], bilinear, size=size, align_corners=corners)


def places():
    indexes = [[0, 2, 1], [2, 0, 3]]
    rows = dict(dim=0, indexes=indexes)
    case("scatter_add", [[4, 3], [2, 3]], lambda x, s: x.scatter_add(0, torch.tensor(indexes), s), **rows)
    case("scatter", [[4, 3], [2, 3]], lambda x, s: x.scatter(0, torch.tensor(indexes), s), **rows)
    narrow = [[0, 0], [4, 1]]
    columns = dict(dim=1, indexes=narrow)
    case("scatter_add", [[3, 5], [2, 2]], lambda x, s: x.scatter_add(1, torch.tensor(narrow), s), **columns)
    case("matmul", [[2, 3, 5, 4], [1, 1, 5, 6]], lambda a, b: a.transpose(2, 3) @ b.expand(2, 3, 5, 6))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    convolutions()
    grids()
    places()
    with open(sys.argv[1], "w") as file:
        json.dump(dict(torch=torch.__version__, cases=CASES), file, separators=(",", ":"))
