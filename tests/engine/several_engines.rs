//! Several engines on one rank.

use crate::support::gan::Gan;
use candle_zero::comm::threads;

fn on_two_ranks<T: Send>(stage: u8, run: impl Fn(&mut Gan) -> candle_zero::Result<T> + Sync) -> Vec<T> {
    let ranks = threads::run(2, |comm| run(&mut Gan::new(stage, Some(comm))?));
    ranks.unwrap().into_iter().map(|rank| rank.unwrap()).collect()
}

#[test]
fn a_gan_trains_with_the_same_bits_at_every_stage() {
    let expected = on_two_ranks(0, |gan| gan.train(8));
    // The training has changed both models.
    assert_ne!(expected[0][..4], expected[0][28..32]);
    for stage in 1..4 {
        assert!(expected == on_two_ranks(stage, |gan| gan.train(8)), "stage {stage}");
    }
}

#[test]
fn the_generators_backward_leaves_the_discriminators_gradients_alone() {
    for stage in 0..4 {
        let train = |tries: bool| {
            on_two_ranks(stage, |gan| {
                let mut norms = vec![];
                for step in 0..3 {
                    if tries {
                        gan.try_generator(step)?;
                        gan.try_generator(step + 10)?;
                    }
                    gan.judge(step)?;
                    norms.push(gan.discriminator.global_grad_norm().unwrap().to_bits());
                }
                Ok(norms)
            })
        };
        assert_eq!(train(true), train(false), "stage {stage}");
    }
}

#[test]
fn an_error_of_one_engine_stops_the_other_in_words() {
    let results = threads::run(2, |comm| {
        let mut gan = Gan::new(1, Some(comm))?;
        if gan.generator.rank() == 1 {
            let nan = gan.generator.forward(|_| candle_core::Tensor::new(f32::NAN, &candle_core::Device::Cpu))?;
            assert!(gan.generator.backward(&nan).is_err());
        }
        gan.judge(0).map(drop)
    });
    for result in results.unwrap() {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("the loss is NaN on rank 1"), "{error}");
    }
}
