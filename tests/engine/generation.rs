//! Models in an engine generate text: parameters are gathered for the generation, and every rank gets the same tokens.

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use candle_zero::comm::threads;
use candle_zero::models::{Architecture, Gpt, GptConfig, LanguageModel, Llama, LlamaConfig, Session, next_token};
use candle_zero::{Engine, Result};
use serde_json::json;

const PROMPT: [u32; 4] = [41, 13, 63, 200];

/// The tokens from a single evaluation, and from one evaluation per token.
type Tokens = [Vec<u32>; 2];

fn generated<A: Architecture>(
    stage: u8,
    world: usize,
    build: impl Fn(VarBuilder<'_>) -> candle_core::Result<LanguageModel<A>> + Sync,
) -> Vec<Tokens> {
    let ranks = threads::run(world, |comm| -> Result<Tokens> {
        let config = json!({
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        });
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(&build, config)?;
        // A training step comes first: the parameters gathered for it have been released again.
        let ids = Tensor::new(&[PROMPT], &Device::Cpu)?;
        let loss = engine.forward(|model| model.loss(&ids, &ids))?;
        engine.backward(&loss)?;
        engine.step()?;
        let at_once = engine.eval(|model| Tensor::new(model.generate(&PROMPT, 20, 0.0, 0)?, &Device::Cpu))?;
        let (mut session, mut tokens) = (Session::new(), PROMPT.to_vec());
        for _ in 0..20 {
            let new = &tokens[session.tokens().len()..];
            let logits = engine.eval(|model| Tensor::new(model.extend(&mut session, new)?, &Device::Cpu))?;
            tokens.push(next_token(&logits.to_vec1()?, 0.0, &mut candle_zero::models::TokenRng::new(0)));
        }
        Ok([at_once.to_vec1()?, tokens.split_off(PROMPT.len())])
    });
    ranks.unwrap().into_iter().map(|rank| rank.unwrap()).collect()
}

#[test]
fn every_stage_and_rank_generates_the_same_tokens() {
    fn check<A: Architecture>(build: impl Fn(VarBuilder<'_>) -> candle_core::Result<LanguageModel<A>> + Sync) {
        let [want] = &generated(0, 1, &build)[..] else { panic!("one rank") };
        assert_eq!(want[0], want[1], "one evaluation gives the same tokens as one for each token");
        for (stage, world) in [(0, 2), (3, 1), (3, 2)] {
            for got in generated(stage, world, &build) {
                assert_eq!(&got, want, "stage {stage}, world size {world}");
            }
        }
    }
    // The prompt and the generated tokens together are longer than the context.
    let gpt = GptConfig { n_layer: 2, ctx: 16, ..GptConfig::preset("nano").unwrap() };
    check(|vb| Gpt::new(&gpt, vb));
    let llama = LlamaConfig { num_hidden_layers: 2, ctx: 16, ..LlamaConfig::preset("llama-nano").unwrap() };
    check(|vb| Llama::new(&llama, vb));
}
