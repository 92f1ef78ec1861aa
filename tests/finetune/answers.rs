//! A model's answers: how a prompt becomes ids, where an answer ends, and that a model and an engine produce the same
//! text.

use crate::fixtures::{base, copy, path};
use candle_core::{DType, Device, Tensor};
use candle_zero::comm::threads;
use candle_zero::models::Decoder;
use candle_zero::{Engine, Result};
use candle_zero_finetune::{BaseModel, Conversation, GeneratedText, Generator, Sampling, Template, Tokenizer};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::Path;

struct Opened {
    base: BaseModel,
    tokenizer: Tokenizer,
    template: Template,
}

impl Opened {
    fn of(folder: &Path) -> Self {
        let tokenizer = Tokenizer::open(folder).unwrap();
        let template = Template::open(folder, &tokenizer).unwrap();
        Self { base: BaseModel::open(folder).unwrap(), tokenizer, template }
    }

    fn generator(&self) -> Generator<'_> {
        Generator::new(&self.base, &self.tokenizer, Some(&self.template)).unwrap()
    }

    fn model(&self) -> Decoder {
        Decoder::new(self.base.config(), self.base.var_builder(DType::F32, &Device::Cpu)).unwrap()
    }
}

fn llama() -> Opened {
    Opened::of(&path("models/llama"))
}

fn sampling(max_tokens: usize) -> Sampling {
    Sampling { max_tokens, ..Sampling::default() }
}

/// Returns the answer of `model`, and the pieces in which it arrived.
fn answer(
    generator: &Generator<'_>,
    model: &Decoder,
    prompt: &[u32],
    sampling: &Sampling,
) -> (GeneratedText, Vec<String>) {
    let mut pieces = Vec::new();
    let give = |piece: &str| {
        pieces.push(piece.to_owned());
        ControlFlow::Continue(())
    };
    let answer = generator.answer(prompt, sampling, |session, ids| Ok(model.extend(session, ids)?), give).unwrap();
    (answer, pieces)
}

#[test]
fn an_answer_is_what_the_model_generates_up_to_a_token_that_ends_it() {
    let opened = llama();
    let (generator, model) = (opened.generator(), opened.model());
    let prompt = generator.encode_conversation(&Conversation::new([("user", "hello there")])).unwrap();
    let text = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(opened.tokenizer.decode(&prompt, false).unwrap(), text);
    let want = model.generate(&prompt, 40, 0.0, 0).unwrap();
    let cut = want.iter().position(|id| generator.stop_token_ids().contains(id));
    let (answered, pieces) = answer(&generator, &model, &prompt, &sampling(40));
    assert_eq!((answered.ids.as_slice(), answered.ended), (&want[..cut.unwrap_or(40)], cut.is_some()));
    assert_eq!(answered.text, opened.tokenizer.decode(&answered.ids, true).unwrap());
    assert!(!answered.text.is_empty() && pieces.concat() == answered.text);

    // A folder that declares one of these tokens as an end token yields the same answer up to that token.
    let folder = copy("llama");
    let end = want[7];
    let first = want.iter().position(|id| *id == end).unwrap();
    std::fs::write(folder.path().join("generation_config.json"), json!({"eos_token_id": [511, end]}).to_string())
        .unwrap();
    let other = Opened::of(folder.path());
    let (answered, _) = answer(&other.generator(), &model, &prompt, &sampling(40));
    assert_eq!((answered.ids.as_slice(), answered.ended), (&want[..first], true));
    // The answer does not count as ended if that token would come after the maximum number of tokens.
    let (answered, _) = answer(&other.generator(), &model, &prompt, &sampling(first));
    assert_eq!((answered.ids.as_slice(), answered.ended), (&want[..first], false));
}

#[test]
fn ends_are_those_of_the_files_and_of_the_template() {
    let folder = copy("llama");
    let change = |name: &str, key: &str, value: serde_json::Value| {
        let path = folder.path().join(name);
        let mut file: serde_json::Value =
            std::fs::read(&path).map_or(json!({}), |bytes| serde_json::from_slice(&bytes).unwrap());
        file[key] = value;
        std::fs::write(path, file.to_string()).unwrap();
    };
    change("config.json", "eos_token_id", json!(7));
    change("generation_config.json", "eos_token_id", json!([9, 8]));
    change("tokenizer_config.json", "eos_token", json!("<|endoftext|>"));
    // 0 comes from the tokenizer's configuration, 2 from the template.
    assert_eq!(Opened::of(folder.path()).generator().stop_token_ids(), [0, 2, 7, 8, 9]);
    let opened = Opened::of(folder.path());
    let without_template = Generator::new(&opened.base, &opened.tokenizer, None).unwrap();
    assert_eq!(without_template.stop_token_ids(), [0, 7, 8, 9]);
}

#[test]
fn what_is_drawn_follows_from_the_seed_and_stays_among_the_likeliest() {
    let opened = llama();
    let (generator, model) = (opened.generator(), opened.model());
    let prompt = generator.encode_text("one two").unwrap();
    let drawn = |seed, top_k, top_p| {
        let sampling = Sampling { max_tokens: 12, temperature: 1.5, top_k, top_p, seed };
        answer(&generator, &model, &prompt, &sampling).0.ids
    };
    let greedy = answer(&generator, &model, &prompt, &sampling(12)).0.ids;
    assert_eq!(drawn(1, 0, 1.0), drawn(1, 0, 1.0));
    assert_ne!(drawn(1, 0, 1.0), drawn(2, 0, 1.0));
    assert_ne!(drawn(1, 0, 1.0), greedy);
    assert_eq!(drawn(1, 1, 1.0), greedy);
    assert_eq!(drawn(1, 0, 1e-6), greedy);
}

#[test]
fn an_answer_ends_where_its_listener_says_so() {
    let opened = llama();
    let (generator, model) = (opened.generator(), opened.model());
    let prompt = generator.encode_text("one two").unwrap();
    let (complete, pieces) = answer(&generator, &model, &prompt, &sampling(12));
    let mut received = String::new();
    let give = |piece: &str| {
        received.push_str(piece);
        ControlFlow::Break(())
    };
    let cut = generator.answer(&prompt, &sampling(12), |s, ids| Ok(model.extend(s, ids)?), give).unwrap();
    assert!(pieces.len() > 1 && cut.ids.len() < complete.ids.len());
    assert_eq!((received.as_str(), cut.text.as_str(), cut.ended), (pieces[0].as_str(), pieces[0].as_str(), false));
}

#[test]
fn ranks_that_share_a_model_at_stage_3_give_the_answer_of_one_that_has_it_whole() {
    let opened = llama();
    let generator = opened.generator();
    let prompt = generator.encode_conversation(&Conversation::new([("user", "hello there")])).unwrap();
    let (want, _) = answer(&generator, &opened.model(), &prompt, &sampling(20));
    let config = json!({
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    });
    let answers = threads::run(2, |comm| -> Result<GeneratedText> {
        let mut engine = Engine::builder()
            .communicator(comm)
            .device(Device::Cpu)
            .initial_values(opened.base.values())
            .initialize(|vb| Decoder::new(opened.base.config(), vb), config.clone())?;
        let extend = |session: &mut _, ids: &[u32]| {
            let logits = engine.eval(|model| Tensor::new(model.extend(session, ids)?, &Device::Cpu))?;
            Ok(logits.to_vec1()?)
        };
        generator.answer(&prompt, &sampling(20), extend, |_| ControlFlow::Continue(()))
    });
    for answer in answers.unwrap() {
        assert_eq!(answer.unwrap(), want);
    }
}

#[test]
fn wrong_prompts_and_numbers_are_refused() {
    let opened = llama();
    let generator = Generator::new(&opened.base, &opened.tokenizer, None).unwrap();
    let refused = |prompt: &[u32], sampling: Sampling| {
        let never = |_: &mut _, _: &[u32]| unreachable!();
        generator.answer(prompt, &sampling, never, |_| ControlFlow::Continue(())).unwrap_err().to_string()
    };
    insta::assert_snapshot!(refused(&[], sampling(1)), @"the prompt has no tokens, but at least one is required; give some text");
    insta::assert_snapshot!(refused(&[1], sampling(0)), @"max_tokens is 0, but must be at least 1");
    let hot = Sampling { temperature: f64::INFINITY, ..sampling(1) };
    insta::assert_snapshot!(refused(&[1], hot), @"temperature is inf, but must be 0 or a positive finite number");
    let none = Sampling { top_p: 0.0, ..sampling(1) };
    insta::assert_snapshot!(refused(&[1], none), @"top_p is 0, but must be above 0 and at most 1");
    let chat = generator.encode_conversation(&Conversation::new([("user", "a")])).unwrap_err().to_string();
    assert!(
        chat.ends_with(
            "copy chat_template.jinja from an instruction-tuned model with the same special tokens, or use \
             prompt/completion data"
        ),
        "{chat}"
    );
    assert_eq!(generator.encode_text("").unwrap(), [0u32; 0]);
    // The tokenizer has more ids than the model has rows.
    let folder = copy("llama");
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let more = json!({"id": 512, "content": "<|more|>", "special": true, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false});
    tokenizer["added_tokens"].as_array_mut().unwrap().push(more);
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let tokenizer = Tokenizer::open(folder.path()).unwrap();
    let error = Generator::new(&base("llama"), &tokenizer, None).unwrap_err().to_string();
    insta::assert_snapshot!(error, @"the tokenizer has ids up to 512, but the model's embedding has 512 rows (1 too few); use the tokenizer that belongs to the model");
}
