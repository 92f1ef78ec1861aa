//! Measures how long it takes to save GPT-2 (124 million parameters, bf16) on one rank. Each round also runs two plain
//! loops that write the same number of bytes in blocks of 1 MiB and sync: one through the page cache, and one without
//! it. Also measures how much a background save delays the step in which it begins, with a sequence of the model's full
//! context length and one of half that length, whose step ends before the disk write does.
//!
//!     cargo bench --bench checkpoint -- [ROUNDS] [FOLDER]
#![allow(clippy::unwrap_used)]

mod keep_memory;

use candle_core::{Device, Tensor};
use candle_zero::checkpoint::SaveOptions;
use candle_zero::models::{Gpt, GptConfig};
use candle_zero::util::counted;
use candle_zero::{Engine, Result};
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

fn main() {
    keep_memory::start_as_a_rank(&[]);
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let rounds = args.first().and_then(|arg| arg.parse().ok()).unwrap_or(3);
    let folder = args.get(1).map_or_else(std::env::temp_dir, Into::into);
    let folder = tempfile::tempdir_in(folder).unwrap();
    measure(rounds, folder.path()).unwrap();
}

fn measure(rounds: usize, folder: &Path) -> Result<()> {
    let config = json!({
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": true},
        "zero_optimization": {"stage": 1},
    });
    let gpt = GptConfig { vocab: 50257, ..GptConfig::preset("gpt2")? };
    let mut engine = Engine::builder().device(Device::Cpu).initialize(|vb| Gpt::new(&gpt, vb), config)?;
    let step = |engine: &mut Engine<Gpt>, tokens: usize, save: bool| -> Result<f64> {
        let ids = |shift: usize| {
            Tensor::from_iter((0..tokens).map(|i| ((i + shift) * 31 % 251) as u32), &Device::Cpu)?.reshape((1, tokens))
        };
        let (inputs, targets) = (ids(0)?, ids(1)?);
        let start = Instant::now();
        if save {
            let options = SaveOptions { in_background: true, ..SaveOptions::default() };
            engine.save_checkpoint_with(folder, Some("background"), Value::Null, &options)?;
        }
        let loss = engine.forward(|model| model.loss(&inputs, &targets))?;
        engine.backward(&loss)?;
        engine.step()?;
        Ok(start.elapsed().as_secs_f64())
    };
    let lengths = [gpt.ctx, gpt.ctx / 2];
    for tokens in lengths {
        step(&mut engine, tokens, false)?;
    }
    let (mut plain, mut direct, mut saved) = (vec![], vec![], vec![]);
    let (mut without_save, mut with_save) = ([vec![], vec![]], [vec![], vec![]]);
    let mut bytes = 0;
    for _ in 0..rounds {
        saved.push(seconds(|| engine.save_checkpoint(folder, Some("foreground"), Value::Null).map(drop))?);
        let file = folder.join("foreground/rank_00000_of_00001.safetensors");
        bytes = std::fs::metadata(&file).unwrap().len();
        std::fs::remove_dir_all(folder.join("foreground")).unwrap();
        plain.push(seconds(|| {
            plain_loop(&folder.join("plain"), bytes, 0);
            Ok(())
        })?);
        direct.push(seconds(|| {
            plain_loop(&folder.join("direct"), bytes, rustix::fs::OFlags::DIRECT.bits().cast_signed());
            Ok(())
        })?);
        for (i, tokens) in lengths.into_iter().enumerate() {
            for _ in 0..2 {
                step(&mut engine, tokens, false)?;
                without_save[i].push(step(&mut engine, tokens, false)?);
                with_save[i].push(step(&mut engine, tokens, true)?);
                std::fs::remove_dir_all(folder.join("background")).unwrap();
            }
        }
    }
    let [plain, direct, saved] = [plain, direct, saved].map(median);
    let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
    println!("{}, {:.2} GB, medians", counted(rounds, "round"), bytes as f64 / 1e9);
    println!("plain loop {plain:.3} s, {:.2} GB/s", rate(plain));
    println!("without the page cache {direct:.3} s, {:.2} GB/s", rate(direct));
    println!(
        "save       {saved:.3} s, {:.2} GB/s, {:.0} % of the faster loop",
        rate(saved),
        plain.min(direct) / saved * 100.0
    );
    for ((tokens, without_save), with_save) in
        lengths.into_iter().zip(without_save.map(median)).zip(with_save.map(median))
    {
        println!(
            "{tokens} tokens: a step takes {without_save:.3} s, or {with_save:.3} s with a save in the background; the \
             delay is {:.0} % of a save",
            (with_save - without_save) / saved * 100.0
        );
    }
    Ok(())
}

fn seconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

fn plain_loop(path: &Path, bytes: u64, flags: i32) {
    const BLOCK: usize = 1 << 20;
    let memory: Vec<u8> = (0..2 * BLOCK as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    // A block that begins at a page boundary and consists of complete pages. The memory is twice as large as the block,
    // to leave room for the alignment.
    let block = &memory[memory.as_ptr().align_offset(4096)..][..BLOCK];
    let mut file = OpenOptions::new().write(true).create(true).custom_flags(flags).open(path).unwrap();
    let mut remaining = bytes.next_multiple_of(4096);
    while remaining > 0 {
        let len = remaining.min(BLOCK as u64);
        file.write_all(&block[..len as usize]).unwrap();
        remaining -= len;
    }
    file.sync_all().unwrap();
    drop(file);
    std::fs::remove_file(path).unwrap();
}

fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}
