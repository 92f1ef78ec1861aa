//! Facts about Candle that candle-zero relies on or works around. A failure after an upgrade shows which fact has
//! changed; then the code named in the test can be reconsidered.

use crate::support::processes::as_program;
use crate::support::swap::swap;
use candle_core::{CpuStorage, CustomOp1, D, DType, Device, Layout, Module, Result, Shape, Tensor, Var};
use candle_nn::{LayerNorm, Linear};
use std::sync::atomic::{AtomicUsize, Ordering};

const CPU: Device = Device::Cpu;

fn numbers(shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>() as u32;
    let data = (0..n).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0);
    Tensor::from_iter(data, &CPU).unwrap().reshape(shape).unwrap()
}

fn var(shape: &[usize]) -> Var {
    Var::from_tensor(&numbers(shape)).unwrap()
}

fn values(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

/// This is why `nn` has its own layer norm, and why this library's models do not use `softmax_last_dim`.
#[test]
fn fused_ops_cut_the_graph_without_an_error() {
    let (first, second) = (var(&[4, 4]), var(&[4, 4]));
    let (weight, bias) = (var(&[4]), var(&[4]));
    let norm = LayerNorm::new(weight.as_tensor().clone(), bias.as_tensor().clone(), 1e-5);
    let x = Linear::new(first.as_tensor().clone(), None).forward(&numbers(&[3, 4])).unwrap();
    let y = Linear::new(second.as_tensor().clone(), None).forward(&norm.forward(&x).unwrap()).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert!(grads.get(&second).is_some());
    assert!([&first, &weight, &bias].iter().all(|v| grads.get(v).is_none()));

    let scores = candle_nn::ops::softmax_last_dim(first.as_tensor()).unwrap();
    assert!(!scores.track_op());
    assert!(candle_nn::ops::softmax(first.as_tensor(), D::Minus1).unwrap().track_op());
}

/// This is why `nn` sums in f32.
#[test]
fn half_sums_stop_growing() {
    let sum = |dtype| {
        let ones = Tensor::ones(65_536, dtype, &CPU).unwrap();
        ones.sum_all().unwrap().to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap()
    };
    assert_eq!((sum(DType::F16), sum(DType::BF16), sum(DType::F32)), (2048.0, 256.0, 65_536.0));
}

/// This is why candle-zero passes no broadcast view to `matmul`.
#[test]
fn matmul_of_a_transposed_left_and_a_broadcast_right_is_wrong() {
    let left = numbers(&[2, 3, 5, 4]).transpose(2, 3).unwrap();
    let right = numbers(&[1, 1, 5, 6]);
    let view = right.broadcast_as((2, 3, 5, 6)).unwrap();
    let want = left.contiguous().unwrap().matmul(&view.contiguous().unwrap()).unwrap();
    let distance = |got: Tensor| (got - &want).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    assert!(distance(left.matmul(&view).unwrap()) > 0.1);
    assert!(distance(left.broadcast_matmul(&right).unwrap()) < 1e-5);
}

fn chain(length: usize) {
    let x = Var::zeros(1, DType::F32, &CPU).unwrap();
    let mut y = x.as_tensor().clone();
    for _ in 0..length {
        y = (y + 1.0).unwrap();
    }
    let grads = y.backward().unwrap();
    assert_eq!(values(grads.get(&x).unwrap()), [1.0]);
}

/// This is why ranks that are threads get large stacks: Candle sorts the graph, and drops it, by recursion.
#[test]
fn a_deep_graph_needs_a_big_stack() {
    const CHILD: &str = "CANDLE_FACTS_SMALL_STACK";
    let with_stack = |bytes: usize, length: usize| {
        std::thread::Builder::new().stack_size(bytes).spawn(move || chain(length)).unwrap().join().unwrap();
    };
    if std::env::var_os(CHILD).is_some() {
        return with_stack(2 << 20, 60_000);
    }
    with_stack(64 << 20, 60_000);
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(as_program(module_path!(), "a_deep_graph_needs_a_big_stack"))
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert!(!child.status.success(), "a stack of 2 MiB is enough now");
    assert!(String::from_utf8_lossy(&child.stderr).contains("overflowed its stack"));
}

/// This is how the values of parameters are taken out and put back.
#[test]
fn storage_can_be_taken_out_and_put_back_under_a_live_graph() {
    let (x, w) = (var(&[3, 4]), var(&[4, 5]));
    let y = x.matmul(&w).unwrap().sqr().unwrap().sum_all().unwrap();
    let want = values(y.backward().unwrap().get(&x).unwrap());
    let kept = swap(&w, CpuStorage::F6E2M3(Vec::new()));
    assert_eq!((w.dtype(), w.dims()), (DType::F32, &[4, 5][..]), "a tensor's dtype and shape are its own");
    assert!(x.matmul(&w).is_err() && (w.as_tensor() + 1.0).is_err() && w.to_vec2::<f32>().is_err());
    assert!(y.backward().is_err(), "touching an absent parameter is an error");
    swap(&w, kept);
    assert_eq!(values(y.backward().unwrap().get(&x).unwrap()), want);
}

/// This is why initialization and sampling have their own generators.
#[test]
fn the_cpu_has_no_seed() {
    assert!(CPU.set_seed(1).is_err());
}

/// An identity operation whose backward pass counts its calls, and returns its gradient only if `pass` is set.
struct Hook {
    calls: &'static AtomicUsize,
    pass: bool,
}

impl CustomOp1 for Hook {
    fn name(&self) -> &'static str {
        "hook"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        Ok(self.pass.then(|| grad.clone()))
    }
}

/// This is how gradients are captured.
#[test]
fn backward_may_give_a_leaf_variable_nothing() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let (x, w) = (var(&[3, 4]), var(&[4, 5]));
    let hooked = w.apply_op1(Hook { calls: &CALLS, pass: false }).unwrap();
    // `hooked` is used twice, and its gradient is complete when the hook is called.
    let y = (x.matmul(&hooked).unwrap() + x.matmul(&hooked).unwrap()).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert_eq!(CALLS.load(Ordering::SeqCst), 1);
    assert!(grads.get(&w).is_none() && grads.get(&x).is_some());
}

/// This is why only leaves may receive no gradient.
#[test]
fn an_inner_tensor_without_a_gradient_is_a_panic() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let x = var(&[3]);
    let inner = (x.as_tensor() * 2.0).unwrap();
    let y = inner.apply_op1(Hook { calls: &CALLS, pass: false }).unwrap();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| y.sum_all().unwrap().backward()));
    assert!(result.is_err());
    assert_eq!(CALLS.load(Ordering::SeqCst), 1);
}

/// This is why the embedding's table is an argument of its op.
#[test]
fn an_op_on_untracked_tensors_has_no_backward() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let x = numbers(&[3]).apply_op1(Hook { calls: &CALLS, pass: true }).unwrap();
    let w = var(&[3]);
    let grads = x.mul(&w).unwrap().sum_all().unwrap().backward().unwrap();
    assert!(grads.get(&w).is_some());
    assert_eq!(CALLS.load(Ordering::SeqCst), 0);
}

/// This is why parameters are the right-hand operands: their gradients then come before those of the layers below.
#[test]
fn the_right_operand_is_finished_first() {
    static LEFT: AtomicUsize = AtomicUsize::new(0);
    static RIGHT: AtomicUsize = AtomicUsize::new(0);
    struct Order {
        clock: &'static AtomicUsize,
        at: &'static AtomicUsize,
    }
    impl CustomOp1 for Order {
        fn name(&self) -> &'static str {
            "order"
        }
        fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
            Ok((storage.clone(), layout.shape().clone()))
        }
        fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
            self.at.store(self.clock.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
            Ok(Some(grad.clone()))
        }
    }
    static CLOCK: AtomicUsize = AtomicUsize::new(1);
    let (x, w) = (var(&[3, 4]), var(&[4, 5]));
    let left = x.apply_op1(Order { clock: &CLOCK, at: &LEFT }).unwrap();
    let right = w.apply_op1(Order { clock: &CLOCK, at: &RIGHT }).unwrap();
    left.matmul(&right).unwrap().sum_all().unwrap().backward().unwrap();
    assert_eq!((RIGHT.load(Ordering::SeqCst), LEFT.load(Ordering::SeqCst)), (1, 2));
}
