//! Convolution along one axis, pooling, resampling, scattering and products of batches. They are compared with Candle's
//! operations whose gradients are correct, with finite differences (`layers`), and with values that PyTorch computed in
//! f64.

use super::layers::{Case, case, close, flat, rounding_intermediates, tensor};
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Conv1dConfig, ConvTranspose1dConfig};
use candle_zero::nn::{self, Conv1d, ConvTranspose1d, Pooling, composed};
use serde::Deserialize;

fn indexes(values: &[u32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape, &Device::Cpu).unwrap()
}

/// Returns the cases. In f64, a layer is composed of Candle's operations, so most cases are compared with themselves in
/// f64.
pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for (x, w, padding, stride, dilation, groups) in [
        ([2, 3, 9], [4, 3, 3], 1, 1, 1, 1),
        ([2, 4, 10], [6, 2, 3], 0, 2, 1, 2),
        ([1, 2, 11], [2, 2, 4], 2, 3, 2, 1),
        ([9, 3, 7], [3, 1, 3], 2, 1, 1, 3),
        ([1, 1, 1], [1, 1, 1], 0, 1, 1, 1),
        ([2, 2, 700], [3, 2, 5], 2, 1, 1, 1),
    ] {
        let config = Conv1dConfig { padding, stride, dilation, groups, ..Conv1dConfig::default() };
        let layer = move |a: &[Tensor]| Conv1d::new(a[1].clone(), a.get(2).cloned(), config).forward(&a[0]);
        let what = format!("conv1d {x:?} {w:?} {padding} {stride} {dilation} {groups}");
        all.push(case(what.clone(), &[&x, &w], layer, layer));
        all.push(case(format!("{what} with bias"), &[&x, &w, &w[..1]], layer, layer));
        // The input is a view with a different layout.
        let turned = [x[1], x[2], x[0]];
        let viewed = move |a: &[Tensor]| layer(&[a[0].permute((2, 0, 1))?, a[1].clone()]);
        all.push(case(format!("{what} of a view"), &[&turned, &w], viewed, viewed));
    }
    for (x, w, (padding, output_padding), stride, dilation, groups) in [
        ([2, 3, 5], [3, 2, 3], (0, 0), 1, 1, 1),
        ([2, 4, 4], [4, 1, 3], (1, 1), 2, 1, 2),
        ([1, 2, 5], [2, 3, 4], (2, 2), 3, 2, 1),
        ([3, 2, 1], [2, 1, 2], (0, 0), 1, 1, 2),
    ] {
        let config = ConvTranspose1dConfig { padding, output_padding, stride, dilation, groups };
        let layer = move |a: &[Tensor]| ConvTranspose1d::new(a[1].clone(), a.get(2).cloned(), config).forward(&a[0]);
        let what = format!("conv_transpose1d {x:?} {w:?} {config:?}");
        all.push(case(what.clone(), &[&x, &w], layer, layer));
        all.push(case(format!("{what} with bias"), &[&x, &w, &[w[1] * groups]], layer, layer));
    }
    for pooling in [
        Pooling::new(2),
        Pooling::new((3, 2)).stride((1, 2)).padding((1, 0)),
        Pooling::new(3).stride(2).padding(1),
        Pooling::new((1, 2)).stride((3, 1)).padding((0, 1)),
        Pooling::new((7, 5)),
    ] {
        let maxima = move |a: &[Tensor]| nn::max_pool2d_with(&a[0], pooling);
        all.push(case(format!("max_pool2d {pooling:?}"), &[&[2, 3, 7, 5]], maxima, maxima));
        let means = move |a: &[Tensor]| nn::avg_pool2d_with(&a[0], pooling);
        all.push(case(format!("avg_pool2d {pooling:?}"), &[&[2, 3, 7, 5]], means, means));
    }
    for size in [1, 4, 5, 10, 13] {
        let nearest = move |a: &[Tensor]| nn::upsample_nearest1d(&a[0], size);
        all.push(case(format!("upsample_nearest1d to {size}"), &[&[2, 3, 5]], nearest, nearest));
    }
    for (h, w) in [(6, 8), (7, 9), (2, 3), (3, 4), (1, 1)] {
        let nearest = move |a: &[Tensor]| nn::upsample_nearest2d(&a[0], h, w);
        all.push(case(format!("upsample_nearest2d to {h} x {w}"), &[&[2, 3, 3, 4]], nearest, nearest));
        for corners in [false, true] {
            let bilinear = move |a: &[Tensor]| nn::upsample_bilinear2d(&a[0], h, w, corners);
            all.push(case(
                format!("upsample_bilinear2d to {h} x {w}, {corners}"),
                &[&[2, 3, 3, 4]],
                bilinear,
                bilinear,
            ));
        }
    }
    for (to, from, dim, values) in [
        // In this order: positions that occur twice, a narrower source, a source longer than the axis, and a position
        // that is ignored.
        (vec![4, 3], vec![2, 3], 0, vec![0, 2, 1, 2, 0, 1]),
        (vec![3, 5], vec![2, 2], 1, vec![0, 0, 4, 1]),
        (vec![2, 3, 2], vec![2, 5, 2], 1, (0..20).map(|i| i * 7 % 3).collect()),
        (vec![3, 2], vec![2, 2], 0, vec![1, u32::MAX, 1, 0]),
    ] {
        let i = indexes(&values, &from);
        let (j, shapes) = (i.clone(), [&to[..], &from[..]]);
        let add = move |a: &[Tensor]| nn::scatter_add(&a[0], &i, &a[1], dim);
        all.push(case(format!("scatter_add {from:?} into {to:?}"), &shapes, add.clone(), add));
        let set = move |a: &[Tensor]| nn::scatter(&a[0], &j, &a[1], dim);
        all.push(case(format!("scatter {from:?} into {to:?}"), &shapes, set.clone(), set));
    }
    for (a, b, turned) in [
        (vec![3, 4], vec![4, 5], [false, false]),
        (vec![2, 3, 4], vec![4, 5], [false, false]),
        (vec![2, 3, 5, 4], vec![1, 1, 5, 6], [true, false]),
        (vec![3, 1, 2, 4], vec![2, 5, 4], [false, true]),
        (vec![2, 1, 7, 3], vec![2, 3, 7, 2], [true, false]),
    ] {
        let views = move |a: &[Tensor]| -> Result<[Tensor; 2]> {
            let view = |x: &Tensor, turned: bool| if turned { x.t() } else { Ok(x.clone()) };
            Ok([view(&a[0], turned[0])?, view(&a[1], turned[1])?])
        };
        let product = move |a: &[Tensor]| views(a).and_then(|[a, b]| nn::matmul(&a, &b));
        let composed = move |a: &[Tensor]| views(a).and_then(|[a, b]| composed::matmul(&a, &b));
        all.push(rounding_intermediates(case(format!("matmul {a:?} {b:?} {turned:?}"), &[&a, &b], product, composed)));
    }
    all
}

/// A layer with its arguments' shapes, and PyTorch's results for them, rounded to six decimals.
#[derive(Deserialize)]
struct Recorded {
    op: String,
    shapes: Vec<Vec<usize>>,
    #[serde(default)]
    stride: serde_json::Value,
    #[serde(default)]
    padding: serde_json::Value,
    #[serde(default)]
    output_padding: usize,
    #[serde(default)]
    dilation: usize,
    #[serde(default)]
    groups: usize,
    #[serde(default)]
    kernel: (usize, usize),
    #[serde(default)]
    size: Vec<usize>,
    #[serde(default)]
    align_corners: bool,
    #[serde(default)]
    dim: usize,
    #[serde(default)]
    indexes: Vec<Vec<u32>>,
    value_shape: Vec<usize>,
    value: Vec<f64>,
    gradients: Vec<Vec<f64>>,
}

impl Recorded {
    fn apply(&self, a: &[Tensor]) -> Result<Tensor> {
        let number = |value: &serde_json::Value| value.as_u64().unwrap_or_default() as usize;
        let (stride, padding) = (number(&self.stride), number(&self.padding));
        let pooling = || Pooling {
            kernel: self.kernel,
            stride: serde_json::from_value(self.stride.clone()).unwrap(),
            padding: serde_json::from_value(self.padding.clone()).unwrap(),
        };
        let Self { output_padding, dilation, groups, size, dim, .. } = self;
        let (dilation, groups, bias) = (*dilation, *groups, a.get(2).cloned());
        match self.op.as_str() {
            "conv1d" => {
                let config = Conv1dConfig { padding, stride, dilation, groups, ..Conv1dConfig::default() };
                Conv1d::new(a[1].clone(), bias, config).forward(&a[0])
            }
            "conv_transpose1d" => {
                let config =
                    ConvTranspose1dConfig { padding, output_padding: *output_padding, stride, dilation, groups };
                ConvTranspose1d::new(a[1].clone(), bias, config).forward(&a[0])
            }
            "max_pool2d" => nn::max_pool2d_with(&a[0], pooling()),
            "avg_pool2d" => nn::avg_pool2d_with(&a[0], pooling()),
            "upsample_nearest1d" => nn::upsample_nearest1d(&a[0], size[0]),
            "upsample_nearest2d" => nn::upsample_nearest2d(&a[0], size[0], size[1]),
            "upsample_bilinear2d" => nn::upsample_bilinear2d(&a[0], size[0], size[1], self.align_corners),
            "scatter" => nn::scatter(&a[0], &Tensor::new(self.indexes.clone(), &Device::Cpu)?, &a[1], *dim),
            "scatter_add" => nn::scatter_add(&a[0], &Tensor::new(self.indexes.clone(), &Device::Cpu)?, &a[1], *dim),
            "matmul" => nn::matmul(&a[0].transpose(2, 3)?, &a[1].broadcast_as((2, 3, 5, 6))?),
            other => panic!("the layer {other} is unknown"),
        }
    }
}

#[test]
fn values_and_gradients_are_those_of_pytorch() {
    #[derive(Deserialize)]
    struct File {
        cases: Vec<Recorded>,
    }
    let file: File = serde_json::from_str(include_str!("../fixtures/pytorch_layers.json")).unwrap();
    assert!(file.cases.len() > 30);
    for (case, dtype) in file.cases.iter().flat_map(|case| [DType::F32, DType::F64].map(|dtype| (case, dtype))) {
        let args = (0..).zip(&case.shapes).map(|(i, shape)| tensor(shape, i, DType::F32).to_dtype(dtype).unwrap());
        let vars: Vec<Var> = args.map(|x| Var::from_tensor(&x).unwrap()).collect();
        let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        let what = format!("{} {:?} {dtype:?}", case.op, case.shapes);
        let y = case.apply(&tensors).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(y.dims(), case.value_shape, "{what}");
        close(&flat(&y), &case.value, 1e-5, 1e-5, &what);
        let weights = tensor(y.dims(), 99, DType::F32).to_dtype(dtype).unwrap();
        let grads = y.mul(&weights).unwrap().sum_all().unwrap().backward().unwrap();
        for (i, (var, want)) in vars.iter().zip(&case.gradients).enumerate() {
            close(&flat(grads.get(var).unwrap()), want, 1e-5, 1e-5, &format!("{what} gradient {i}"));
        }
    }
}

#[test]
fn the_gradient_of_a_maximum_is_its_slope() {
    // The values are distinct integers, so a change of 0.25 moves no maximum.
    let data: Vec<f32> = (0..210u32).map(|i| (i * 97 % 210) as f32).collect();
    for pooling in [Pooling::new(2), Pooling::new((3, 2)).stride((1, 2)).padding((1, 0)), Pooling::new(3).stride(2)] {
        let value = |data: &[f32]| {
            let x = Var::from_tensor(&Tensor::from_slice(data, (2, 3, 7, 5), &Device::Cpu).unwrap()).unwrap();
            let y = nn::max_pool2d_with(&x, pooling).unwrap();
            let weights = tensor(y.dims(), 99, DType::BF16).to_dtype(DType::F32).unwrap();
            let grads = (&y * &weights).unwrap().sum_all().unwrap().backward().unwrap();
            let sum: f64 = flat(&y).iter().zip(flat(&weights)).map(|(y, weight)| y * weight).sum();
            (sum, flat(grads.get(&x).unwrap()))
        };
        let (_, grads) = value(&data);
        for (i, grad) in grads.iter().enumerate() {
            let shifted = |by: f32| {
                let mut data = data.clone();
                data[i] += by;
                value(&data).0
            };
            let slope = shifted(0.25) - shifted(-0.25);
            assert!((2.0 * slope - grad).abs() < 1e-9, "{pooling:?} element {i}: {} not {grad}", 2.0 * slope);
        }
    }
}

#[test]
fn of_equal_maxima_the_first_gets_the_gradient_and_a_nan_is_one() {
    let run = |data: &[f32]| {
        let x = Var::from_tensor(&Tensor::from_slice(data, (1, 1, 2, 2), &Device::Cpu).unwrap()).unwrap();
        let y = nn::max_pool2d(&x, 2).unwrap();
        (flat(&y), flat(y.sum_all().unwrap().backward().unwrap().get(&x).unwrap()))
    };
    assert_eq!(run(&[1.0, 5.0, 5.0, 2.0]), (vec![5.0], vec![0.0, 1.0, 0.0, 0.0]));
    assert_eq!(run(&[f32::NEG_INFINITY; 4]), (vec![f64::NEG_INFINITY], vec![1.0, 0.0, 0.0, 0.0]));
    let (y, grad) = run(&[1.0, f32::NAN, 5.0, 2.0]);
    assert!(y[0].is_nan());
    // A NaN is passed on, and its position receives the gradient.
    assert_eq!(grad, [0.0, 1.0, 0.0, 0.0]);
}

#[test]
fn settings_and_shapes_that_do_not_fit_are_refused_by_name() {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let conv = |x: &[usize], w: &[usize], config| {
        Conv1d::new(zeros(w), None, config).forward(&zeros(x)).unwrap_err().to_string()
    };
    let config = Conv1dConfig::default();
    let text = conv(&[1, 2, 4], &[3, 2, 5], config);
    assert!(text.contains("the kernel spans 5 elements, but the input has 4"), "{text}");
    let text = conv(&[1, 3, 4], &[3, 2, 1], config);
    assert!(text.contains("an input of shape [1, 3, 4] needs"), "{text}");
    let text = conv(&[1, 2, 4], &[3, 2, 1], Conv1dConfig { stride: 0, ..config });
    assert!(text.contains("conv1d: stride is 0"), "{text}");
    let text = conv(&[1, 2, 4], &[3, 2, 2], Conv1dConfig { dilation: usize::MAX, ..config });
    assert!(text.contains("kernel spans") || text.contains("too long"), "{text}");
    let transposed =
        |config| ConvTranspose1d::new(zeros(&[2, 3, 2]), None, config).forward(&zeros(&[1, 2, 4])).unwrap_err();
    let config = ConvTranspose1dConfig::default();
    let text = transposed(ConvTranspose1dConfig { output_padding: 1, ..config }).to_string();
    assert!(text.contains("output_padding is 1; it must be below the stride, 1"), "{text}");
    let text = transposed(ConvTranspose1dConfig { padding: 9, ..config }).to_string();
    assert!(text.contains("leaves no output"), "{text}");
    let text = nn::max_pool2d(&zeros(&[1, 1, 3, 3]), 4).unwrap_err().to_string();
    assert!(text.contains("a window of 4 does not fit into a height of 3"), "{text}");
    let text = nn::avg_pool2d_with(&zeros(&[1, 1, 3, 3]), Pooling::new(2).padding(2)).unwrap_err().to_string();
    assert!(text.contains("the padding at most half of the kernel"), "{text}");
    let text = nn::upsample_nearest2d(&zeros(&[1, 1, 3, 3]), 0, 4).unwrap_err().to_string();
    assert!(text.contains("a height of 3 cannot be resized to 0"), "{text}");
    let places = indexes(&[0, 3], &[2, 1]);
    let text = nn::scatter_add(&zeros(&[3, 1]), &places, &zeros(&[2, 1]), 0).unwrap_err().to_string();
    assert!(text.contains("index 3 along dimension 0"), "{text}");
    let text = nn::scatter(&zeros(&[3, 1]), &places, &zeros(&[2, 2]), 0).unwrap_err().to_string();
    assert!(text.contains("the source has shape [2, 2]"), "{text}");
    let text = nn::matmul(&zeros(&[2, 3]), &zeros(&[2, 3])).unwrap_err().to_string();
    assert!(text.contains("they must be [.., m, k] and [.., k, n]"), "{text}");
}

#[test]
fn a_convolution_with_f32_parameters_takes_16_bit_inputs() {
    for low in [DType::BF16, DType::F16] {
        let vars = [tensor(&[2, 3, 9], 0, low), tensor(&[4, 3, 3], 1, DType::F32), tensor(&[4], 2, DType::F32)]
            .map(|x| Var::from_tensor(&x).unwrap());
        let layer =
            Conv1d::new(vars[1].as_tensor().clone(), Some(vars[2].as_tensor().clone()), Conv1dConfig::default());
        let y = layer.forward(&vars[0]).unwrap();
        let grads = y.sum_all().unwrap().backward().unwrap();
        assert_eq!(y.dtype(), low);
        let formats: Vec<DType> = vars.iter().map(|var| grads.get(var).unwrap().dtype()).collect();
        assert_eq!(formats, [low, DType::F32, DType::F32]);
    }
}
