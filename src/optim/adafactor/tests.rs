//! Tests of Adafactor.

use super::*;

const SHAPE: [usize; 3] = [2, 3, 700];

fn part(kind: PartKind, beta1: Option<f64>) -> AdafactorPart {
    let config = AdafactorConfig {
        lr: Some(0.01),
        warmup_init: false,
        eps: (1e-30, 1e-3),
        clip_threshold: 1.0,
        decay_rate: -0.8,
        beta1,
        weight_decay: 0.01,
        scale_parameter: true,
    };
    AdafactorPart { config, kind }
}

/// Returns the weights and states after some steps, each of which visits the parameter in slices that end at
/// `cuts`.
fn run(part: &AdafactorPart, shape: &[usize], cuts: &[usize]) -> (Vec<f32>, Vec<Vec<f32>>, Vec<f32>) {
    let len: usize = shape.iter().product();
    let mut param: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin()).collect();
    let mut states = vec![vec![0.0f32; len]; part.state_names().len()];
    let mut factored = vec![0.0f32; part.factored_lens(shape).iter().sum()];
    let ends = || cuts.iter().copied().chain([len]);
    for step in 1..4 {
        let ctx = StepContext { grad_scale: 0.5, ..StepContext::new(0.01, step) };
        let grad: Vec<f32> = (0..len).map(|i| (i as f32 * 0.11 * step as f32).cos()).collect();
        let mut visit = |work: &mut dyn FnMut(SlicePosition<'_>, FactoredSlice<'_, '_>), factored: &[f32]| {
            let mut first = 0;
            for end in ends() {
                let mut state: Vec<&mut [f32]> = states.iter_mut().map(|state| &mut state[first..end]).collect();
                let (param, grad) = (&mut param[first..end], FlatRef::F32(&grad[first..end]));
                let slice = FactoredSlice { param, grad, state: &mut state, factored };
                work(SlicePosition { shape, first }, slice);
                first = end;
            }
        };
        if !factored.is_empty() {
            let mut sums = vec![0.0; factored.len()];
            visit(&mut |at, slice| part.add_sums(&ctx, at, slice.grad, &mut sums), &factored);
            part.take_sums(&ctx, shape, &sums, &mut factored);
        }
        let mut squares = SquareSums::default();
        visit(&mut |at, slice| part.add_squares(&ctx, at, slice, &mut squares), &factored);
        visit(&mut |at, slice| FactoredOptimizer::update(part, &ctx, at, slice, squares, None), &factored);
    }
    (param, states, factored)
}

#[test]
fn slices_of_a_parameter_give_the_bits_of_the_whole_parameter() {
    for beta1 in [None, Some(0.9)] {
        for (kind, shape) in [(PartKind::Matrices, &SHAPE[..]), (PartKind::Vectors, &[4200][..])] {
            let part = part(kind, beta1);
            let whole = run(&part, shape, &[]);
            // These slices end within rows. Squares are summed in blocks, so slices must begin at multiples of a
            // block.
            assert!(whole == run(&part, shape, &[1024, 3072]), "{kind:?}, {beta1:?}");
        }
    }
}

#[test]
fn sums_over_rows_and_columns_do_not_depend_on_where_slices_end() {
    let part = part(PartKind::Matrices, None);
    let len: usize = SHAPE.iter().product();
    let grad: Vec<f32> = (0..len).map(|i| (i as f32 * 0.11).cos()).collect();
    let sums = |cuts: &[usize]| {
        let mut sums = vec![0.0; part.factored_lens(&SHAPE).iter().sum()];
        let mut first = 0;
        for end in cuts.iter().copied().chain([len]) {
            let at = SlicePosition { shape: &SHAPE, first };
            part.add_sums(&StepContext::new(0.1, 1), at, FlatRef::F32(&grad[first..end]), &mut sums);
            first = end;
        }
        sums
    };
    let whole = sums(&[]);
    let row: f64 = grad[700..1400].iter().map(|g| f64::from(*g) * f64::from(*g) + 1e-30).sum();
    assert_eq!(whole[1], row);
    // This is the sum of column 5 of the second matrix.
    let column: f64 = (3..6).map(|row| f64::from(grad[row * 700 + 5]).powi(2) + 1e-30).sum();
    assert_eq!(whole[6 + 700 + 5], column);
    for cuts in [&[1, 2, 699, 700, 701][..], &[2099, 2100, 2101], &[300, 300, 1500, 4199]] {
        assert_eq!(sums(cuts), whole, "{cuts:?}");
    }
}

#[test]
fn relative_steps_begin_at_a_hundredth_or_near_zero_and_fall_with_the_root_of_the_step() {
    assert_eq!([0, 9_999, 39_999].map(relative_step), [0.01, 0.01, 0.005]);
    assert_eq!(relative_step_with_warmup(0), 1e-6);
    assert_eq!(relative_step_with_warmup(39_999), 0.005);
}
