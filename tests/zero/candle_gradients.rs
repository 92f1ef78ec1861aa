//! Checks of the table in docs/vision.md: Candle's wrong gradients and its correct ones are compared with finite
//! differences of Candle's own values in f64. A failure after an upgrade of Candle shows which row has changed.

use candle_core::{Device, Result, Tensor, Var};

type Function = fn(&[Tensor]) -> Result<Tensor>;

fn numbers(shape: &[usize], seed: u64) -> Tensor {
    let mix = |i: u64| {
        let x = (i + seed * 1_000_003 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((x ^ (x >> 27)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    Tensor::from_iter((0..shape.iter().product::<usize>() as u64).map(mix), &Device::Cpu)
        .unwrap()
        .reshape(shape)
        .unwrap()
}

fn values(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the sum of a result's elements, each with a different weight.
fn weighed(y: &Tensor) -> Result<Tensor> {
    (y * numbers(y.dims(), 99))?.sum_all()
}

/// Returns, for each argument, how far Candle's gradient is from the finite differences, as a fraction of the largest
/// of them.
fn errors(function: Function, shapes: &[&[usize]]) -> Result<Vec<f64>> {
    let args: Vec<Tensor> = (0..).zip(shapes).map(|(seed, shape)| numbers(shape, seed)).collect();
    let vars: Vec<Var> = args.iter().map(|arg| Var::from_tensor(arg).unwrap()).collect();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let grads = weighed(&function(&tensors)?)?.backward()?;
    let slope = |arg: usize, element: usize| -> f64 {
        const STEP: f64 = 1e-6;
        let value = |by: f64| {
            let mut all = values(&args[arg]);
            all[element] += by;
            let mut args = args.clone();
            args[arg] = Tensor::from_vec(all, args[arg].shape(), &Device::Cpu).unwrap();
            weighed(&function(&args).unwrap()).unwrap().to_scalar::<f64>().unwrap()
        };
        (value(STEP) - value(-STEP)) / (2.0 * STEP)
    };
    let error = |(arg, var): (usize, &Var)| {
        let slopes: Vec<f64> = (0..args[arg].elem_count()).map(|element| slope(arg, element)).collect();
        let got = values(grads.get(var).expect("a gradient"));
        let largest = slopes.iter().fold(0f64, |most, slope| most.max(slope.abs()));
        got.iter().zip(&slopes).fold(0f64, |most, (got, slope)| most.max((got - slope).abs())) / largest
    };
    Ok(vars.iter().enumerate().map(error).collect())
}

/// Asserts that an operation's gradient is still wrong.
#[track_caller]
fn is_wrong(what: &str, replacement: &str, function: Function, shapes: &[&[usize]]) {
    let errors = errors(function, shapes).unwrap();
    assert!(
        errors.iter().any(|error| *error > 0.1),
        "the gradients of Candle's {what} are now correct ({errors:?}); reconsider {replacement} and its row in \
         docs/vision.md"
    );
}

/// Asserts that an operation still has no gradient in this case.
#[track_caller]
fn is_refused(what: &str, replacement: &str, function: Function, shapes: &[&[usize]]) {
    let result = errors(function, shapes);
    assert!(
        result.is_err(),
        "Candle's {what} now has a gradient ({result:?}); reconsider {replacement} and its row in docs/vision.md"
    );
}

fn indexes(rows: &[[u32; 3]]) -> Tensor {
    Tensor::from_iter(rows.iter().flatten().copied(), &Device::Cpu).unwrap().reshape((rows.len(), 3)).unwrap()
}

#[test]
fn the_gradients_of_conv1d_are_wrong() {
    is_wrong("conv1d", "nn::Conv1d", |a| a[0].conv1d(&a[1], 1, 1, 1, 1), &[&[2, 3, 9], &[4, 3, 3]]);
    is_wrong("conv1d with a stride", "nn::Conv1d", |a| a[0].conv1d(&a[1], 0, 2, 1, 1), &[&[2, 3, 9], &[4, 3, 3]]);
}

fn difference(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar().unwrap()
}

#[test]
fn conv1d_misreads_views() {
    let (x, w) = (numbers(&[3, 9, 2], 0).permute((2, 0, 1)).unwrap(), numbers(&[3, 3, 4], 1).transpose(0, 2).unwrap());
    let views = x.conv1d(&w, 1, 1, 1, 1).unwrap();
    let copies = x.contiguous().unwrap().conv1d(&w.contiguous().unwrap(), 1, 1, 1, 1).unwrap();
    assert!(
        difference(&views, &copies) > 0.1,
        "Candle's conv1d of views is now correct; reconsider nn::Conv1d and its row in docs/vision.md"
    );
}

/// The product inside the operation has a transposed left operand and a broadcast right one.
#[test]
fn conv_transpose1d_of_several_samples_is_wrong() {
    let (x, w) = (numbers(&[2, 3, 9], 0), numbers(&[3, 4, 3], 1));
    let together = x.conv_transpose1d(&w, 0, 0, 2, 1, 1).unwrap();
    let one = |i: usize| x.narrow(0, i, 1).unwrap().contiguous().unwrap().conv_transpose1d(&w, 0, 0, 2, 1, 1).unwrap();
    let separate = Tensor::cat(&[one(0), one(1)], 0).unwrap();
    assert!(
        difference(&together, &separate) > 0.1,
        "Candle's conv_transpose1d of a batch is now correct; reconsider nn::ConvTranspose1d and its row in docs/vision.md"
    );
}

#[test]
fn conv2d_has_no_gradient_where_rows_and_columns_leave_over_different_numbers() {
    let stride: Function = |a| a[0].conv2d(&a[1], 1, 2, 1, 1);
    is_refused(
        "conv2d with a stride",
        "the advice to use an image of a different size",
        stride,
        &[&[2, 3, 5, 6], &[4, 3, 3, 3]],
    );
}

#[test]
fn conv_transpose1d_has_no_gradient() {
    let function: Function = |a| a[0].conv_transpose1d(&a[1], 0, 0, 1, 1, 1);
    is_refused("conv_transpose1d", "nn::ConvTranspose1d", function, &[&[2, 3, 5], &[3, 2, 3]]);
}

#[test]
fn the_gradients_of_pooling_are_wrong_and_missing_where_windows_overlap() {
    is_wrong("max_pool2d", "nn::max_pool2d", |a| a[0].max_pool2d(2), &[&[1, 2, 5, 7]]);
    is_wrong("avg_pool2d", "nn::avg_pool2d", |a| a[0].avg_pool2d(2), &[&[1, 2, 5, 7]]);
    // A window's only maximum gets only a part of its gradient, as if all elements of the window were maxima.
    is_wrong("max_pool2d of whole windows", "nn::max_pool2d", |a| a[0].max_pool2d(2), &[&[1, 2, 4, 6]]);
    is_refused("max_pool2d", "nn::max_pool2d", |a| a[0].max_pool2d_with_stride(3, 2), &[&[1, 2, 5, 7]]);
    is_refused("avg_pool2d", "nn::avg_pool2d", |a| a[0].avg_pool2d_with_stride(3, 2), &[&[1, 2, 5, 7]]);
}

#[test]
fn upsampling_forgets_what_else_its_input_is_used_for_and_has_no_gradient_for_other_factors() {
    let replacement = "nn::upsample_nearest2d";
    // An earlier gradient of the input is replaced.
    let twice: Function = |a| &a[0].upsample_nearest2d(8, 8)?.narrow(2, 0, 4)?.narrow(3, 0, 4)? + (&a[0] * 3.0)?;
    is_wrong("upsample_nearest2d of an input that is used twice", replacement, twice, &[&[1, 2, 4, 4]]);
    let twice: Function = |a| &a[0].upsample_nearest1d(8)?.narrow(2, 0, 4)? + (&a[0] * 3.0)?;
    is_wrong("upsample_nearest1d of an input that is used twice", "nn::upsample_nearest1d", twice, &[&[1, 2, 4]]);
    is_refused("upsample_nearest2d", replacement, |a| a[0].upsample_nearest2d(5, 7), &[&[1, 2, 3, 3]]);
    is_refused("upsample_nearest2d", replacement, |a| a[0].upsample_nearest2d(6, 9), &[&[1, 2, 3, 3]]);
    is_refused("upsample_nearest1d", "nn::upsample_nearest1d", |a| a[0].upsample_nearest1d(5), &[&[1, 2, 3]]);
    let bilinear: Function = |a| a[0].upsample_bilinear2d(6, 6, false);
    is_refused("upsample_bilinear2d", "nn::upsample_bilinear2d", bilinear, &[&[1, 2, 3, 3]]);
}

#[test]
fn the_gradients_of_scatter_are_wrong() {
    let set: Function = |a| a[0].scatter(&indexes(&[[0, 1, 2], [3, 3, 0]]), &a[1], 0);
    let add: Function = |a| a[0].scatter_add(&indexes(&[[0, 1, 2], [3, 3, 0], [1, 1, 1], [2, 0, 0]]), &a[1], 0);
    let narrow: Function = |a| a[0].scatter_add(&indexes(&[[0, 1, 2], [3, 3, 0]]), &a[1], 0);
    is_wrong("scatter", "nn::scatter", set, &[&[4, 3], &[2, 3]]);
    is_wrong("scatter_add", "nn::scatter_add", add, &[&[4, 3], &[4, 3]]);
    is_refused("scatter_add of a narrower source", "nn::scatter_add", narrow, &[&[4, 3], &[2, 3]]);
}

/// The values are wrong, too (`candle_facts`), so the gradients are compared with those of copies.
#[test]
fn the_gradients_of_a_product_of_a_transposed_and_a_broadcast_view_are_wrong() {
    let shapes: [&[usize]; 2] = [&[2, 3, 5, 4], &[1, 1, 5, 6]];
    let vars = [0, 1].map(|i| Var::from_tensor(&numbers(shapes[i], i as u64)).unwrap());
    let gradient = |copied: bool| {
        let (a, b) = (vars[0].transpose(2, 3).unwrap(), vars[1].broadcast_as((2, 3, 5, 6)).unwrap());
        let (a, b) = if copied { (a.contiguous().unwrap(), b.contiguous().unwrap()) } else { (a, b) };
        let loss = weighed(&a.matmul(&b).unwrap().sqr().unwrap()).unwrap();
        values(loss.backward().unwrap().get(&vars[1]).unwrap())
    };
    let largest = gradient(true).iter().zip(gradient(false)).fold(0f64, |most, (a, b)| most.max((a - b).abs()));
    assert!(largest > 0.1, "Candle's matmul of these views is now correct; reconsider nn::matmul");
}

#[test]
fn the_other_operations_of_vision_and_sequence_models_have_right_gradients() {
    let right: [(&str, Function, Vec<&[usize]>); 15] = [
        ("conv2d", |a| a[0].conv2d(&a[1], 1, 2, 1, 1), vec![&[2, 3, 5, 7], &[4, 3, 3, 3]]),
        ("conv2d of even sizes", |a| a[0].conv2d(&a[1], 1, 2, 1, 1), vec![&[2, 3, 6, 4], &[4, 3, 3, 3]]),
        ("conv2d with dilation", |a| a[0].conv2d(&a[1], 2, 1, 2, 1), vec![&[1, 2, 5, 6], &[3, 2, 3, 3]]),
        ("conv2d in groups", |a| a[0].conv2d(&a[1], 0, 1, 1, 2), vec![&[1, 4, 5, 5], &[6, 2, 2, 2]]),
        ("conv_transpose2d", |a| a[0].conv_transpose2d(&a[1], 1, 0, 2, 1), vec![&[1, 2, 4, 4], &[2, 3, 3, 3]]),
        ("avg_pool2d of whole windows", |a| a[0].avg_pool2d(2), vec![&[1, 2, 4, 6]]),
        ("upsample_nearest2d by a whole factor", |a| a[0].upsample_nearest2d(6, 6), vec![&[1, 2, 3, 3]]),
        ("gather", |a| a[0].gather(&indexes(&[[0, 1, 1], [2, 2, 0]]), 0), vec![&[4, 3]]),
        ("index_select", |a| a[0].index_select(&Tensor::new(&[2u32, 0, 2], &Device::Cpu)?, 1), vec![&[2, 3]]),
        ("index_add", |a| a[0].index_add(&Tensor::new(&[2u32, 0, 2], &Device::Cpu)?, &a[1], 0), vec![&[4, 3], &[3, 3]]),
        ("slice_scatter", |a| a[0].slice_scatter(&a[1], 1, 1), vec![&[2, 4], &[2, 2]]),
        ("pad_with_zeros", |a| a[0].pad_with_zeros(1, 1, 2), vec![&[2, 4]]),
        ("max", |a| a[0].max(1), vec![&[3, 5]]),
        ("broadcast_matmul", |a| a[0].transpose(1, 2)?.broadcast_matmul(&a[1]), vec![&[2, 4, 3], &[4, 5]]),
        ("log_softmax", |a| candle_nn::ops::log_softmax(&a[0], 1), vec![&[3, 5]]),
    ];
    for (name, function, shapes) in right {
        let errors = errors(function, &shapes).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(errors.iter().all(|error| *error < 1e-5), "{name}: {errors:?}");
    }
}
