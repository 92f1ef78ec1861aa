//! Guarantees of the layers beyond correct values: bits, memory, errors.

use crate::support::swap::swap;
use candle_core::{CpuStorage, DType, Device, Result, Tensor, Var};
use candle_zero::nn::{self, AttentionOptions, LossOptions, Sequences, WeightLayout};

fn tensor(shape: &[usize], seed: u32) -> Tensor {
    let n = shape.iter().product::<usize>() as u32;
    let data = (0..n).map(|i| ((i ^ seed.wrapping_mul(0x85EB_CA77)).wrapping_mul(2_654_435_761) >> 8) as f32);
    Tensor::from_iter(data.map(|x| x / 8_388_608.0 - 1.0), &Device::Cpu).unwrap().reshape(shape).unwrap()
}

fn ids(shape: &[usize], below: u32) -> Tensor {
    let n = shape.iter().product::<usize>() as u32;
    Tensor::from_iter((0..n).map(|i| (i * 7 + 3) % below), &Device::Cpu).unwrap().reshape(shape).unwrap()
}

fn bits(t: &Tensor) -> Vec<f32> {
    t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the loss of a small network of several ops, and its variables.
fn network(dtype: DType) -> (Tensor, Vec<Var>) {
    let shapes: [&[usize]; 8] = [&[50, 24], &[24], &[24], &[24, 72], &[72], &[300, 24], &[300], &[50, 300]];
    let vars: Vec<Var> = (0..)
        .zip(shapes)
        .map(|(i, shape)| Var::from_tensor(&tensor(shape, i).to_dtype(dtype).unwrap()).unwrap())
        .collect();
    let x = nn::embedding(&ids(&[3, 90], 50), &vars[0]).unwrap();
    let x = nn::layer_norm(&x, &vars[1], &vars[2], 1e-5).unwrap();
    let x = nn::linear(&x, &vars[3], Some(&vars[4]), WeightLayout::InOut).unwrap();
    let x = nn::causal_attention(&x, 4).unwrap();
    let x = nn::linear(&x, &vars[5], Some(&vars[6]), WeightLayout::OutIn).unwrap();
    let x = nn::linear(&nn::gelu_tanh(&x).unwrap(), &vars[7], None, WeightLayout::OutIn).unwrap();
    (nn::cross_entropy(&x, &ids(&[3, 90], 50)).unwrap(), vars)
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let (loss, vars) = network(dtype);
                let grads = loss.backward().unwrap();
                let grads: Vec<_> = vars.iter().map(|v| bits(grads.get(v).unwrap())).collect();
                (bits(&loss), grads)
            })
        };
        let one = run(1);
        assert!(one.1.iter().flatten().any(|x| *x != 0.0));
        assert!(one == run(2) && one == run(3), "{dtype:?}");
    }
}

#[test]
fn rows_do_not_depend_on_how_many_rows_there_are() {
    let (w, b, qkv_w) = (tensor(&[24, 40], 1), tensor(&[40], 2), tensor(&[48, 24], 3));
    type Function = Box<dyn Fn(&Tensor) -> Tensor>;
    let functions: [(&str, Function); 4] = [
        ("linear in-out", Box::new(move |x| nn::linear(x, &w, Some(&b), WeightLayout::InOut).unwrap())),
        ("linear out-in", Box::new(move |x| nn::linear(x, &qkv_w, None, WeightLayout::OutIn).unwrap())),
        ("layer_norm", Box::new(|x| nn::layer_norm(x, &tensor(&[24], 4), &tensor(&[24], 5), 1e-5).unwrap())),
        ("causal_attention", Box::new(|x| nn::causal_attention(x, 2).unwrap())),
    ];
    let x = tensor(&[200, 3, 24], 6);
    for (name, f) in functions {
        let all = Var::from_tensor(&x).unwrap();
        let y = f(&all);
        let grad = y.sqr().unwrap().sum_all().unwrap().backward().unwrap().remove(&all).unwrap();
        for rows in [1, 2, 47] {
            let some = Var::from_tensor(&x.narrow(0, 150, rows).unwrap()).unwrap();
            let z = f(&some);
            let z_grad = z.sqr().unwrap().sum_all().unwrap().backward().unwrap().remove(&some).unwrap();
            assert!(bits(&z) == bits(&y.narrow(0, 150, rows).unwrap()), "{name}, {rows} rows");
            assert!(bits(&z_grad) == bits(&grad.narrow(0, 150, rows).unwrap()), "{name}, gradient, {rows} rows");
        }
    }
}

#[test]
fn views_give_what_their_copies_give() {
    // The tensors are transposed, cut out of a larger tensor or broadcast; none of them is contiguous.
    let x = tensor(&[6, 4, 5], 0).transpose(0, 1).unwrap();
    let wide = tensor(&[4, 9, 24], 1).narrow(1, 2, 6).unwrap();
    let (w, b) = (tensor(&[9, 5], 2).t().unwrap(), tensor(&[1], 3).broadcast_as(9).unwrap());
    let run = |copy: bool| {
        let arg = |t: &Tensor| if copy { t.contiguous().unwrap() } else { t.clone() };
        let [x, wide, w, b] = [&x, &wide, &w, &b].map(|t| Var::from_tensor(&t.contiguous().unwrap()).unwrap());
        // The variables are contiguous, but the ops get views of them.
        let view = |v: &Var| arg(&v.transpose(0, v.rank() - 1).unwrap().contiguous().unwrap());
        let (xt, wt) = (view(&x).transpose(0, 2).unwrap(), view(&w).t().unwrap());
        let (xt, wt) = (arg(&xt), arg(&wt));
        assert_eq!(xt.is_contiguous(), copy);
        let y = nn::linear(&xt, &wt, Some(&b), WeightLayout::InOut).unwrap();
        let n = nn::layer_norm(
            &xt,
            &arg(&wide.narrow(2, 0, 1).unwrap().flatten_all().unwrap()).narrow(0, 3, 5).unwrap(),
            &tensor(&[5], 9),
            1e-5,
        )
        .unwrap();
        let a = nn::causal_attention(&arg(&wide.transpose(0, 1).unwrap()), 2).unwrap();
        let g = nn::gelu_tanh(&arg(&a.transpose(1, 2).unwrap())).unwrap();
        let e = nn::embedding(&arg(&ids(&[3, 4], 5).t().unwrap()), &wt).unwrap();
        let c = nn::cross_entropy(&arg(&y.transpose(0, 1).unwrap()), &arg(&ids(&[4, 6], 9).t().unwrap())).unwrap();
        // These operations return gradients as views of a transpose or of a broadcast.
        let all = [y.transpose(0, 2), n.transpose(0, 1), g.transpose(0, 1), e.transpose(0, 1)];
        let sum =
            all.into_iter().fold(c.clone(), |sum, t| (sum + t.unwrap().sqr().unwrap().sum_all().unwrap()).unwrap());
        let grads = sum.backward().unwrap();
        let values = [&y, &n, &a, &g, &e, &c].map(bits).to_vec();
        (values, [&x, &wide, &w, &b].map(|v| bits(grads.get(v).unwrap())).to_vec())
    };
    let (views, copies) = (run(false), run(true));
    assert!(views.0 == copies.0);
    assert!(views.1 == copies.1);
}

#[test]
fn half_gradients_are_summed_in_f32() {
    // A sum to which ones are added one after another stops growing at 256 in bf16 and at 2048 in f16.
    for (dtype, n) in [(DType::BF16, 1024), (DType::F16, 8192)] {
        let table = Var::zeros((3, 2), dtype, &Device::Cpu).unwrap();
        let looked_up = nn::embedding(&Tensor::ones(n, DType::U32, &Device::Cpu).unwrap(), &table).unwrap();
        let ones = looked_up.ones_like().unwrap();
        let grads = looked_up.mul(&ones).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(bits(grads.get(&table).unwrap()), [0.0, 0.0, n as f32, n as f32, 0.0, 0.0]);

        let weight = Var::ones((1, 2), dtype, &Device::Cpu).unwrap();
        let bias = Var::zeros(2, dtype, &Device::Cpu).unwrap();
        let x = Tensor::ones((n, 1), dtype, &Device::Cpu).unwrap();
        let y = nn::linear(&x, &weight, Some(&bias), WeightLayout::InOut).unwrap();
        let grads = y.mul(&y.ones_like().unwrap()).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(bits(grads.get(&weight).unwrap()), [n as f32; 2]);
        assert_eq!(bits(grads.get(&bias).unwrap()), [n as f32; 2]);
    }
}

#[test]
fn the_loss_gradient_is_multiplied_by_the_f32_scale_before_rounding() {
    // f16 cannot represent this number: a loss scale divided by the number of micro batches, 3.
    let scale = 65536.0 / 3.0f32;
    for (dtype, precision) in [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
        let logits = tensor(&[2, 7], 5).to_dtype(dtype).unwrap();
        let var = Var::from_tensor(&logits).unwrap();
        let targets = ids(&[2], 7);
        let loss = nn::cross_entropy(&var, &targets).unwrap();
        let grads = (loss * f64::from(scale)).unwrap().backward().unwrap();
        let got = bits(grads.get(&var).unwrap());
        let rows: Vec<Vec<f64>> = logits.to_dtype(DType::F64).unwrap().to_vec2().unwrap();
        for (r, row) in rows.iter().enumerate() {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            for (c, x) in row.iter().enumerate() {
                let hot = if c as u32 == targets.to_vec1::<u32>().unwrap()[r] { 1.0 } else { 0.0 };
                let want = (x.exp() / sum - hot) * f64::from(scale) / 2.0;
                let error = (f64::from(got[r * 7 + c]) - want).abs();
                assert!(error <= precision * want.abs() * 1.001, "{dtype:?} {r} {c}: {} {want}", got[r * 7 + c]);
            }
        }
    }
}

#[test]
fn parameters_may_leave_between_forward_and_backward_and_are_missed_by_name_of_the_op() {
    let absent = || CpuStorage::F6E2M3(Vec::new());
    let plain = {
        let (loss, vars) = network(DType::F32);
        let grads = loss.backward().unwrap();
        vars.iter().map(|v| bits(grads.get(v).unwrap())).collect::<Vec<_>>()
    };
    let (loss, vars) = network(DType::F32);
    let kept: Vec<CpuStorage> = vars.iter().map(|v| swap(v, absent())).collect();
    let text = loss.backward().unwrap_err().to_string();
    assert!(text.contains("is sharded") && text.contains("linear"), "{text}");
    for (var, storage) in vars.iter().zip(kept) {
        swap(var, storage);
    }
    let grads = loss.backward().unwrap();
    assert!(plain == vars.iter().map(|v| bits(grads.get(v).unwrap())).collect::<Vec<_>>());

    let x = tensor(&[2, 24], 0);
    let (w, b) = (&vars[3], &vars[4]);
    swap(b, absent());
    assert!(nn::linear(&x, w, Some(b), WeightLayout::InOut).unwrap_err().to_string().contains("is sharded"));
    swap(&vars[0], absent());
    assert!(nn::embedding(&ids(&[2], 50), &vars[0]).unwrap_err().to_string().contains("is sharded"));
    swap(&vars[1], CpuStorage::F32(Vec::new()));
    assert!(nn::layer_norm(&x, &vars[1], &vars[2], 1e-5).unwrap_err().to_string().contains("holds 0 elements"));
}

#[test]
fn frozen_arguments_get_no_gradient_and_cost_nothing() {
    let (x, w) = (tensor(&[3, 4], 0), tensor(&[4, 5], 1));
    let b = Var::from_tensor(&tensor(&[5], 2)).unwrap();
    let y = nn::linear(&x, &w, Some(&b), WeightLayout::InOut).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert!(grads.get(&w).is_none() && grads.get(&x).is_none());
    assert_eq!(bits(grads.get(&b).unwrap()), [3.0; 5]);
    let gamma = Var::from_tensor(&tensor(&[4], 3)).unwrap();
    let y = nn::layer_norm(&x, &gamma, &tensor(&[4], 4), 1e-5).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert!(grads.get(&gamma).is_some() && grads.get(&x).is_none());
}

#[test]
fn rows_whose_target_is_ignored_count_for_nothing() {
    let targets = Tensor::new(&[-100i64, 3, -100, 0, 4, -100], &Device::Cpu).unwrap();
    let counted_rows = Tensor::new(&[1u32, 3, 4], &Device::Cpu).unwrap();
    let counted_targets = Tensor::new(&[3u32, 0, 4], &Device::Cpu).unwrap();
    let select = |x: &Tensor| x.index_select(&counted_rows, 0).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let var = |shape: &[usize], seed| Var::from_tensor(&tensor(shape, seed).to_dtype(dtype).unwrap()).unwrap();
        let (h, w) = (var(&[6, 5], 3), var(&[8, 5], 4));
        let with_grads = |loss: Tensor, x: &Var| {
            let (value, mut grads) = (loss.to_scalar::<f32>().unwrap(), loss.backward().unwrap());
            (value, grads.remove(x).unwrap(), grads.remove(&w))
        };
        // Checks that the loss and the gradients are those without the ignored rows, whose own gradients are zero.
        let check = |x: &Var, loss: Tensor, counted_loss: Tensor| {
            let (some, some_x, some_w) = with_grads(loss, x);
            let (all, all_x, all_w) = with_grads(counted_loss, x);
            assert_eq!((some, bits(&some_x)), (all, bits(&all_x)));
            assert!(bits(&some_x)[..5].iter().all(|gradient| *gradient == 0.0));
            for (a, b) in some_w.iter().zip(&all_w).flat_map(|(a, b)| bits(a).into_iter().zip(bits(b))) {
                assert!((a - b).abs() <= 1e-6 + 1e-2 * f32::from(u8::from(dtype == DType::BF16)) * b.abs(), "{a} {b}");
            }
        };
        check(&h, nn::cross_entropy(&h, &targets).unwrap(), nn::cross_entropy(&select(&h), &counted_targets).unwrap());
        let head =
            |h: &Tensor, targets: &Tensor| nn::linear_cross_entropy(h, &w, WeightLayout::OutIn, targets).unwrap();
        check(&h, head(&h, &targets), head(&select(&h), &counted_targets));
    }
    let x = tensor(&[2, 4], 0);
    let text = |targets: [i64; 2]| {
        let targets = Tensor::new(&targets, &Device::Cpu).unwrap();
        nn::cross_entropy(&x, &targets).unwrap_err().to_string().lines().next().unwrap().to_string()
    };
    insta::assert_snapshot!(text([-100, -100]), @"cross_entropy: the mean over zero rows is undefined; logits have shape [2, 4], and a target of -100 does not count");
    insta::assert_snapshot!(text([-100, -1]), @"target -1 at position 1 (counted over the flattened targets) is outside the logits' 4 classes; targets must be below 4");
}

/// Returns the loss of the rows of `h`, and the gradients of `h` and of a weight.
fn head(h: &Tensor, targets: &[i64], divisor: Option<f64>) -> Result<(f32, Vec<f32>, Vec<f32>)> {
    let (h, w) = (Var::from_tensor(h)?, Var::from_tensor(&tensor(&[8, 5], 4))?);
    let targets = Tensor::new(targets, &Device::Cpu)?;
    let options = LossOptions { divisor, ..LossOptions::default() };
    let loss = nn::linear_cross_entropy_with(&h, &w, WeightLayout::OutIn, &targets, options)?;
    let grads = loss.backward()?;
    Ok((loss.to_scalar()?, bits(grads.get(&h).unwrap()), bits(grads.get(&w).unwrap())))
}

#[test]
fn losses_over_a_divisor_add_up_to_the_mean_of_the_whole_batch() {
    let h = tensor(&[6, 5], 3);
    let targets = [-100i64, 3, -100, 0, 4, -100];
    let whole = head(&h, &targets, None).unwrap();
    // The batch has three parts, the last of which has no target.
    let parts = [0..2, 2..5, 5..6].map(|rows: std::ops::Range<usize>| {
        head(&h.narrow(0, rows.start, rows.len()).unwrap(), &targets[rows], Some(3.0)).unwrap()
    });
    let close = |a: f32, b: f32| (a - b).abs() <= 1e-6;
    assert!(close(parts.iter().map(|part| part.0).sum(), whole.0));
    assert!(parts.iter().flat_map(|part| &part.1).zip(&whole.1).all(|(a, b)| close(*a, *b)));
    assert!((0..40).all(|i| close(parts.iter().map(|part| part.2[i]).sum(), whole.2[i])));
    assert_eq!(parts[2], (0.0, vec![0.0; 5], vec![0.0; 40]));
    let logits = Var::from_tensor(&tensor(&[1, 4], 3)).unwrap();
    let none = Tensor::new(&[-100i64], &Device::Cpu).unwrap();
    let options = LossOptions { divisor: Some(3.0), ..LossOptions::default() };
    let loss = nn::cross_entropy_with(&logits, &none, options).unwrap();
    assert_eq!((bits(&loss), bits(loss.backward().unwrap().get(&logits).unwrap())), (vec![0.0], vec![0.0; 4]));
    let text = |options| nn::cross_entropy_with(&logits, &none, options).unwrap_err().to_string();
    let text = |options| text(options).lines().next().unwrap().to_string();
    insta::assert_snapshot!(text(LossOptions { divisor: Some(0.0), ..options }), @"cross_entropy: the divisor is 0; it must be a positive finite number");
    insta::assert_snapshot!(text(LossOptions { soft_cap: Some(-1.0), ..options }), @"cross_entropy: the soft cap is -1; it must be a positive finite number");
}

#[test]
fn rows_without_a_target_have_log_probability_0_and_no_gradient() {
    for dtype in [DType::F32, DType::BF16] {
        let var = |shape: &[usize], seed| Var::from_tensor(&tensor(shape, seed).to_dtype(dtype).unwrap()).unwrap();
        let (h, w) = (var(&[2, 3, 5], 3), var(&[8, 5], 4));
        let targets = Tensor::new(&[[-100i64, 3, -100], [0, 4, -100]], &Device::Cpu).unwrap();
        let log_probabilities = nn::linear_log_probabilities(&h, &w, WeightLayout::OutIn, &targets, None).unwrap();
        assert_eq!((log_probabilities.dims(), log_probabilities.dtype()), (&[2, 3][..], DType::F32));
        let values = bits(&log_probabilities);
        assert!([0, 2, 5].iter().all(|i| values[*i] == 0.0) && [1, 3, 4].iter().all(|i| values[*i] < 0.0));
        let loss = nn::linear_cross_entropy(&h, &w, WeightLayout::OutIn, &targets).unwrap();
        assert!((values.iter().sum::<f32>() + 3.0 * bits(&loss)[0]).abs() < 1e-5);
        let weights = Tensor::new(&[[5f32, 1.0, 5.0], [-2.0, 0.0, 5.0]], &Device::Cpu).unwrap();
        let grads = (log_probabilities * weights).unwrap().sum_all().unwrap().backward().unwrap();
        let of_h = bits(grads.get(&h).unwrap());
        let rows: Vec<bool> = of_h.chunks_exact(5).map(|row| row.iter().any(|x| *x != 0.0)).collect();
        assert_eq!(rows, [false, true, false, true, false, false]);
    }
}

/// Returns the result of attention on rows, and the gradient of its input.
fn attended(qkv: &Tensor, attend: &AttentionOptions, sequences: Option<&Sequences>) -> (Tensor, Tensor) {
    let qkv = Var::from_tensor(qkv).unwrap();
    let y = nn::fused_attention(&qkv, 2, attend, sequences).unwrap();
    let grad = y.sqr().unwrap().sum_all().unwrap().backward().unwrap().remove(&qkv).unwrap();
    (y.detach(), grad)
}

#[test]
fn neither_padding_nor_neighbours_change_a_bit_of_a_sequence() {
    let attends = [
        AttentionOptions::default(),
        AttentionOptions { bidirectional: true, ..AttentionOptions::default() },
        AttentionOptions { bidirectional: true, window: Some(9), ..AttentionOptions::default() },
        AttentionOptions { scale: Some(0.7), soft_cap: Some(2.0), window: Some(20), bidirectional: false },
    ];
    for (attend, dtype) in attends.iter().flat_map(|attend| [(attend, DType::F32), (attend, DType::BF16)]) {
        let alone = [tensor(&[1, 75, 48], 1), tensor(&[1, 30, 48], 2)].map(|x| x.to_dtype(dtype).unwrap());
        let want = alone.clone().map(|x| attended(&x, attend, None));
        let junk = tensor(&[1, 55, 48], 3).to_dtype(dtype).unwrap();
        let rows = Tensor::cat(&[&alone[1], &alone[0], &junk], 1).unwrap();
        let sequences = Sequences::from_lengths(&[vec![30, 75]], 160).unwrap();
        let got = attended(&rows, attend, Some(&sequences));
        for (i, (start, time)) in [(30, 75), (0, 30)].into_iter().enumerate() {
            let part = |x: &Tensor| bits(&x.narrow(1, start, time).unwrap());
            assert!(part(&got.0) == bits(&want[i].0) && part(&got.1) == bits(&want[i].1), "{attend:?} {dtype:?}");
        }
    }
}

#[test]
fn sequences_and_options_that_do_not_fit_are_refused() {
    let (qkv, one) = (tensor(&[2, 6, 24], 1), Sequences::padded(&[4], 6).unwrap());
    let text = |attend: AttentionOptions, sequences| {
        let error = nn::fused_attention(&qkv, 2, &attend, sequences).unwrap_err().to_string();
        error.lines().next().unwrap().to_string()
    };
    let usual = AttentionOptions::default();
    insta::assert_snapshot!(text(usual, Some(&one)), @"causal_attention: the sequences cover [1, 6] positions, but the input has [2, 6]");
    insta::assert_snapshot!(text(AttentionOptions { window: Some(0), ..usual }, None), @"attention: scale, soft cap and window must be positive and finite; they are AttentionOptions { scale: None, soft_cap: None, window: Some(0), bidirectional: false }");
    let mut cache = nn::KeyValueCache::new(6);
    let both_ways = AttentionOptions { bidirectional: true, ..usual };
    let error = cache.fused_attention(&qkv, 2, &both_ways).unwrap_err().to_string();
    insta::assert_snapshot!(error.lines().next().unwrap(), @"attention with a cache: bidirectional attention sees positions that the cache does not hold yet");
    let rotary = nn::Rotary::new(4, 5, 1e4).unwrap();
    let error = |result: Result<Tensor>| result.unwrap_err().to_string().lines().next().unwrap().to_string();
    let long = Sequences::padded(&[6, 6], 6).unwrap();
    insta::assert_snapshot!(error(rotary.forward_in(&qkv, &long)), @"rotary: a sequence has 6 positions, but there are angles for only 5");
    insta::assert_snapshot!(error(nn::rms_norm_with(&qkv, &tensor(&[5], 1), nn::RmsNormOptions { by_head: true, ..Default::default() })), @"rms_norm: the weight has shape [5], but must be a vector whose length divides the last dimension of the input, which has shape [2, 6, 24]");
}

#[test]
fn empty_batches_pass_through() {
    let w = Var::from_tensor(&tensor(&[4, 5], 1)).unwrap();
    let x = Tensor::zeros((0, 4), DType::F32, &Device::Cpu).unwrap();
    let y = nn::linear(&x, &w, None, WeightLayout::InOut).unwrap();
    assert_eq!(y.dims(), [0, 5]);
    assert_eq!(nn::layer_norm(&x, &tensor(&[4], 0), &tensor(&[4], 0), 1e-5).unwrap().dims(), [0, 4]);
    assert_eq!(nn::gelu_tanh(&x).unwrap().dims(), [0, 4]);
    let none = Tensor::zeros((0, 3), DType::U32, &Device::Cpu).unwrap();
    assert_eq!(nn::embedding(&none, &w).unwrap().dims(), [0, 3, 5]);
    let qkv = Tensor::zeros((2, 0, 12), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(nn::causal_attention(&qkv, 2).unwrap().dims(), [2, 0, 4]);
    assert!(nn::cross_entropy(&x, &Tensor::zeros(0, DType::U32, &Device::Cpu).unwrap()).is_err());
}

#[test]
fn shapes_and_dtypes_that_do_not_fit_are_refused() {
    let text = |r: Result<Tensor>| {
        let text = r.unwrap_err().to_string();
        text.lines().next().unwrap().to_string()
    };
    let (x, w) = (tensor(&[3, 4], 0), tensor(&[5, 4], 1));
    insta::assert_snapshot!(text(nn::linear(&x, &w, None, WeightLayout::InOut)), @"linear: the input has shape [3, 4]; its last dimension must be 5, the number of inputs of the weight");
    insta::assert_snapshot!(text(nn::linear(&x, &w, Some(&tensor(&[4], 2)), WeightLayout::OutIn)), @"linear: the bias has shape [4]; it must have shape [5], the number of outputs of the weight");
    insta::assert_snapshot!(text(nn::linear(&x, &w.to_dtype(DType::BF16).unwrap(), None, WeightLayout::OutIn)), @"dtype mismatch in linear, lhs: F32, rhs: BF16");
    insta::assert_snapshot!(text(nn::gelu_tanh(&x.to_dtype(DType::F64).unwrap())), @"unsupported dtype F64 for op gelu_tanh");
    insta::assert_snapshot!(text(nn::causal_attention(&tensor(&[1, 2, 12], 0), 3)), @"causal_attention: the input has shape [1, 2, 12]; it must be [batch, time, 3 * width] with a width divisible by the number of heads, 3");
    insta::assert_snapshot!(text(nn::layer_norm(&x, &tensor(&[3], 0), &tensor(&[4], 0), 1e-5)), @"layer_norm: weight [3] and bias [4] must have the length of the last dimension of the input, which has shape [3, 4]");
    insta::assert_snapshot!(text(nn::embedding(&ids(&[2], 3).to_dtype(DType::I64).unwrap(), &w)), @"embedding: the ids have dtype I64, not u32; convert them with to_dtype(DType::U32)");
    insta::assert_snapshot!(text(nn::cross_entropy(&x, &ids(&[2], 3))), @"cross_entropy: logits [3, 4] need targets of shape [3], not [2]");
}
