//! Trains a ResNet-18 under ZeRO to tell images apart, and says after each epoch how many it gets right.
//!
//!     zerorun --num_ranks 2 examples/train_vision.rs --ds_config examples/train_vision.json
//!     zerorun --num_ranks 2 examples/train_vision.rs --ds_config examples/train_vision.json --data cifar-10-batches-bin
//!
//! The model is of candle-nn's convolutions and batch norm, with the 3x3 stem for small images (He et al. 2015, section
//! 4.2); `--large_stem` is the one for ImageNet, whose overlapping maximum is of candle_zero::nn. `--data` names the folder of CIFAR-10's binary files; without it the images are drawn by a rule: ten shapes of
//! any size, place and colour, on noise. See docs/vision.md.

use anyhow::{Context, ensure};
use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{
    BatchNorm, Conv2d, Conv2dConfig, Linear, Module, ModuleT, VarBuilder, batch_norm, conv2d_no_bias, linear, ops,
};
use candle_zero::Engine;
use candle_zero::checkpoint::{LoadOptions, SaveOptions};
use candle_zero::cli::DsArgs;
use candle_zero::config::RunValues;
use candle_zero::data::BatchShape;
use candle_zero::monitor::MetricsWriter;
use candle_zero::nn::{Pooling, SyncBatchNorm, cross_entropy, in_training, max_pool2d_with, sync_batch_norm};
use candle_zero::zero::{Unit, unit};
use clap::Parser;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

#[derive(Parser)]
#[command(about = "Trains a ResNet-18 under ZeRO")]
struct Args {
    #[command(flatten)]
    ds: DsArgs,
    /// Folder with CIFAR-10's data_batch_1.bin to data_batch_5.bin and test_batch.bin [default: images made by rule]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Side of the images that are made
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(8..=64), conflicts_with = "data")]
    image: u16,
    /// Images that are made to train with
    #[arg(long, default_value_t = 2560, conflicts_with = "data")]
    images: usize,
    /// Images of the validation part, which are never trained with [default: 500 that are made, all of CIFAR-10's]
    #[arg(long, value_name = "N")]
    validation: Option<usize>,
    /// Channels of the first stage; the others have 2, 4 and 8 times as many. 64 is the published model
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=512))]
    width: u16,
    /// Passes through the training part
    #[arg(long, default_value_t = 8)]
    epochs: u64,
    /// Stop after so many optimizer steps
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Part of each target that is spread over all classes
    #[arg(long = "label_smoothing", alias = "label-smoothing", default_value_t = 0.1, value_name = "P")]
    label_smoothing: f64,
    /// Statistics of batch norm over the batches of all ranks
    #[arg(long = "sync_batch_norm", alias = "sync-batch-norm")]
    sync_batch_norm: bool,
    /// The published stem, for larger images: a 7x7 convolution and a 3x3 maximum, each of stride 2
    #[arg(long = "large_stem", alias = "large-stem")]
    large_stem: bool,
    /// Recompute each block in backward instead of keeping its activations
    #[arg(long = "activation_checkpointing", alias = "activation-checkpointing")]
    activation_checkpointing: bool,
    /// Seed of initial weights, order and augmentation [default: the configuration's]
    #[arg(long)]
    seed: Option<u64>,
    /// Where to write one JSON line per epoch
    #[arg(long, value_name = "FILE.jsonl")]
    metrics: Option<PathBuf>,
    /// Folder of checkpoints; one is saved after each epoch
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Resume from the newest checkpoint in the folder of --save, or start if there is none
    #[arg(long, requires = "save")]
    resume: bool,
    /// Where to write the trained weights and running statistics
    #[arg(long, value_name = "FILE.safetensors")]
    export: Option<PathBuf>,
}

const CLASSES: usize = 10;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    let smoothing = args.label_smoothing;
    ensure!((0.0..1.0).contains(&smoothing), "--label_smoothing is {smoothing}; it must be at least 0 and below 1");
    // How the data falls into batches is known when the configuration has been read, and decides how long a cosine is.
    let mut builder = Engine::builder();
    let config = candle_zero::Config::load_for(
        args.ds.ds_config.as_path(),
        candle_zero::comm::RankEnv::from_env()?.world_size,
        &RunValues { total_num_steps: Some(1), ..RunValues::default() },
    )?;
    let seed = args.seed.unwrap_or(config.seed);
    let [training, validation] = match &args.data {
        Some(dir) => [Images::cifar(dir, true)?, Images::cifar(dir, false)?],
        None => {
            let (side, validation) = (usize::from(args.image), args.validation.unwrap_or(500));
            // Of another seed than the weights: --seed changes the training, not the task.
            [Images::made(side, args.images, 0), Images::made(side, validation, 1)]
        }
    };
    let validation = validation.first(args.validation);
    let batch = config.batch.train_batch_size;
    let per_epoch = (training.len() / batch) as u64;
    ensure!(per_epoch > 0, "there are {} images to train with, and a batch has {batch}; give more", training.len());
    ensure!(validation.len() > 0, "--validation is 0; an accuracy is of one image at least");
    let all_steps = per_epoch * args.epochs;
    let steps = args.steps.map_or(all_steps, |most| most.min(all_steps));

    builder = builder.seed(seed).run_values(RunValues { total_num_steps: Some(steps), ..RunValues::default() });
    let sizes = Sizes {
        width: usize::from(args.width),
        large_stem: args.large_stem,
        sync: args.sync_batch_norm,
        recompute: args.activation_checkpointing,
    };
    let mut engine = builder.initialize(|vb| ResNet::new(&sizes, vb), args.ds.ds_config.as_path())?;
    let first = engine.rank() == 0;
    if let (true, Some(dir)) = (args.resume, &args.save)
        && let Some(loaded) = engine.load_checkpoint(dir, None, &LoadOptions::default())?
        && first
    {
        println!("goes on after step {}: {}", engine.global_steps(), loaded.path.display());
    }
    let mut metrics = match &args.metrics {
        Some(path) if first && args.resume => Some(MetricsWriter::append(path)?),
        Some(path) if first => Some(MetricsWriter::create(path)?),
        _ => None,
    };
    let shape = BatchShape::new(&engine.config().batch, engine.world_size(), engine.rank());
    let start = Instant::now();
    while engine.global_steps() < steps {
        let epoch = engine.global_steps() / per_epoch;
        let end = steps.min((epoch + 1) * per_epoch);
        let order = shuffled(training.len(), seed, epoch);
        let (mut loss, mut count) = (0.0, 0.0);
        while engine.global_steps() < end {
            let in_epoch = engine.global_steps() - epoch * per_epoch;
            for micro in 0..shape.accumulation {
                let places = (0..shape.micro).map(|j| shape.global_sample(in_epoch, micro, j) as usize);
                let numbers: Vec<usize> = places.map(|place| order[place]).collect();
                let (x, y) = training.batch(&numbers, Some((seed, epoch)), engine.dtype(), engine.device())?;
                let value = engine.forward(|net| smoothed(&net.forward(&x)?, &y, smoothing))?;
                engine.backward(&value)?;
                engine.step()?;
                loss += f64::from(value.to_dtype(DType::F32)?.to_scalar::<f32>()?);
                count += 1.0;
            }
        }
        let accuracy = accuracy(&mut engine, &validation, shape.micro.max(50))?;
        let losses = engine.gather_f64(&[loss / count])?;
        let loss = losses.iter().map(|rank| rank[0]).sum::<f64>() / losses.len() as f64;
        let (step, seconds) = (engine.global_steps(), start.elapsed().as_secs_f64());
        if first {
            println!(
                "epoch {} step {step}: loss {loss:.4}, validation accuracy {:.1} %, {seconds:.0} s",
                epoch + 1,
                100.0 * accuracy
            );
        }
        if let Some(metrics) = &mut metrics {
            metrics.write(&json!({
                "epoch": epoch + 1, "step": step, "loss": loss, "accuracy": accuracy, "seconds": seconds,
            }))?;
        }
        if let Some(dir) = &args.save {
            engine.save_checkpoint_with(dir, None, Value::Null, &SaveOptions::default())?;
        }
    }
    if let Some(path) = &args.export {
        engine.export_safetensors(path)?;
    }
    Ok(())
}

/// Cross entropy with targets of which `part` is spread over all classes (Szegedy et al. 2015, section 7).
fn smoothed(logits: &Tensor, y: &Tensor, part: f64) -> Result<Tensor> {
    let sharp = cross_entropy(logits, y)?.to_dtype(DType::F32)?;
    let spread = ops::log_softmax(&logits.to_dtype(DType::F32)?, D::Minus1)?.mean_all()?.neg()?;
    (sharp * (1.0 - part))? + (spread * part)?
}

/// The part of `images` whose class the model finds; collective. Every rank looks at its own part of them.
fn accuracy(engine: &mut Engine<ResNet>, images: &Images, batch: usize) -> anyhow::Result<f64> {
    engine.sync_buffers()?;
    let (world, rank) = (engine.world_size(), engine.rank());
    let (each, dtype) = (images.len().div_ceil(world), engine.dtype());
    let (mut right, mut seen) = (0.0, 0.0);
    for start in (0..each).step_by(batch) {
        // As many batches on every rank: what is behind the end is looked at and not counted.
        let places: Vec<usize> = (start..each.min(start + batch)).map(|place| place * world + rank).collect();
        let numbers: Vec<usize> = places.iter().map(|place| place % images.len()).collect();
        let (x, y) = images.batch(&numbers, None, dtype, engine.device())?;
        let found = engine.eval(|net| net.forward(&x)?.argmax(D::Minus1))?.to_vec1::<u32>()?;
        for ((place, found), y) in places.iter().zip(found).zip(y.to_vec1::<u32>()?) {
            if *place < images.len() {
                seen += 1.0;
                right += f64::from(u8::from(found == y));
            }
        }
    }
    let ranks = engine.gather_f64(&[right, seen])?;
    let sum = |i: usize| ranks.iter().map(|rank| rank[i]).sum::<f64>();
    Ok(sum(0) / sum(1))
}

// ---- the model ------------------------------------------------------------------------------------

struct Sizes {
    width: usize,
    large_stem: bool,
    sync: bool,
    recompute: bool,
}

/// Batch norm of one rank's batch, or of all ranks'.
enum Norm {
    Own(BatchNorm),
    Sync(SyncBatchNorm),
}

impl Norm {
    fn new(sync: bool, width: usize, vb: VarBuilder<'_>) -> Result<Self> {
        if sync { sync_batch_norm(width, 1e-5, vb).map(Self::Sync) } else { batch_norm(width, 1e-5, vb).map(Self::Own) }
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Own(norm) => norm.forward_t(x, in_training()),
            Self::Sync(norm) => norm.forward_t(x, in_training()),
        }
    }
}

fn convolution(from: usize, to: usize, kernel: usize, stride: usize, vb: VarBuilder<'_>) -> Result<Conv2d> {
    let config = Conv2dConfig { padding: kernel / 2, stride, ..Conv2dConfig::default() };
    conv2d_no_bias(from, to, kernel, config, vb)
}

/// Two convolutions, and the way around them.
struct Block {
    conv1: Conv2d,
    bn1: Norm,
    conv2: Conv2d,
    bn2: Norm,
    downsample: Option<(Conv2d, Norm)>,
}

impl Block {
    /// Names are torchvision's.
    fn new(sync: bool, from: usize, to: usize, stride: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let downsample = if stride > 1 || from != to {
            let vb = vb.pp("downsample");
            Some((convolution(from, to, 1, stride, vb.pp(0))?, Norm::new(sync, to, vb.pp(1))?))
        } else {
            None
        };
        Ok(Self {
            conv1: convolution(from, to, 3, stride, vb.pp("conv1"))?,
            bn1: Norm::new(sync, to, vb.pp("bn1"))?,
            conv2: convolution(to, to, 3, 1, vb.pp("conv2"))?,
            bn2: Norm::new(sync, to, vb.pp("bn2"))?,
            downsample,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.bn1.forward(&self.conv1.forward(x)?)?.relu()?;
        let y = self.bn2.forward(&self.conv2.forward(&y)?)?;
        let around = match &self.downsample {
            Some((conv, norm)) => norm.forward(&conv.forward(x)?)?,
            None => x.clone(),
        };
        (y + around)?.relu()
    }
}

/// ResNet-18.
struct ResNet {
    conv1: Conv2d,
    bn1: Norm,
    /// Behind the large stem.
    pooling: Option<Pooling>,
    blocks: Vec<Unit<Block>>,
    fc: Linear,
}

impl ResNet {
    fn new(sizes: &Sizes, vb: VarBuilder<'_>) -> Result<Self> {
        let Sizes { width, large_stem, sync, recompute } = *sizes;
        let (mut blocks, mut from) = (Vec::new(), width);
        for stage in 0..4 {
            let to = width << stage;
            for block in 0..2 {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                let vb = vb.pp(format!("layer{}.{block}", stage + 1));
                blocks.push(unit(vb, |vb| Block::new(sync, from, to, stride, vb))?.checkpointed(recompute));
                from = to;
            }
        }
        let (kernel, stride) = if large_stem { (7, 2) } else { (3, 1) };
        Ok(Self {
            conv1: convolution(3, width, kernel, stride, vb.pp("conv1"))?,
            bn1: Norm::new(sync, width, vb.pp("bn1"))?,
            pooling: large_stem.then(|| Pooling::new(3).stride(2).padding(1)),
            blocks,
            fc: linear(from, CLASSES, vb.pp("fc"))?,
        })
    }
}

impl Module for ResNet {
    /// Images `[batch, 3, height, width]`; logits `[batch, 10]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.bn1.forward(&self.conv1.forward(x)?)?.relu()?;
        let x = match self.pooling {
            Some(pooling) => max_pool2d_with(&x, pooling)?,
            None => x,
        };
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        self.fc.forward(&x.mean((2, 3))?)
    }
}

// ---- the images -----------------------------------------------------------------------------------

/// Images of three planes of bytes, and their classes.
struct Images {
    side: usize,
    pixels: Vec<u8>,
    classes: Vec<u8>,
}

/// Mean and standard deviation of CIFAR-10's planes, of 255.
const PLANES: [(f32, f32); 3] = [(125.3, 63.0), (123.0, 62.1), (113.9, 66.7)];

impl Images {
    fn len(&self) -> usize {
        self.classes.len()
    }

    fn first(mut self, most: Option<usize>) -> Self {
        let count = most.map_or(self.len(), |most| most.min(self.len()));
        self.classes.truncate(count);
        self.pixels.truncate(count * 3 * self.side * self.side);
        self
    }

    /// CIFAR-10's training or test part: records of a class and 3 x 32 x 32 bytes.
    fn cifar(dir: &Path, training: bool) -> anyhow::Result<Self> {
        const RECORD: usize = 1 + 3 * 32 * 32;
        let names: Vec<String> = match training {
            true => (1..=5).map(|i| format!("data_batch_{i}.bin")).collect(),
            false => vec!["test_batch.bin".into()],
        };
        let mut images = Self { side: 32, pixels: Vec::new(), classes: Vec::new() };
        for path in names.into_iter().map(|name| dir.join(name)) {
            let shown = path.display();
            let bytes = std::fs::read(&path).with_context(|| format!("cannot read {shown} of CIFAR-10"))?;
            let are_records = !bytes.is_empty() && bytes.len().is_multiple_of(RECORD);
            ensure!(are_records, "{shown} has {} bytes, which are no records of {RECORD} bytes", bytes.len());
            for record in bytes.chunks(RECORD) {
                ensure!(usize::from(record[0]) < CLASSES, "{shown} has an image of class {}", record[0]);
                images.classes.push(record[0]);
                images.pixels.extend(&record[1..]);
            }
        }
        Ok(images)
    }

    /// `count` images by rule, the same for the same `seed`; as many of each class. A mirrored image stays of its class.
    fn made(side: usize, count: usize, seed: u64) -> Self {
        let mut images = Self { side, pixels: Vec::with_capacity(count * 3 * side * side), classes: Vec::new() };
        for number in 0..count {
            let mut random = Random::of(&[seed, number as u64]);
            let class = number % CLASSES;
            let radius = side as f32 * (0.3 + 0.14 * random.unit());
            let mut place = || radius + (side as f32 - 2.0 * radius) * random.unit();
            let (x0, y0) = (place(), place());
            let mut colour = || [0; 3].map(|_| random.unit());
            let (inside, mut outside) = (colour(), colour());
            // The shape must be visible: one plane at least differs much.
            let plane = number / CLASSES % 3;
            outside[plane] = (inside[plane] + 0.5) % 1.0;
            for plane in 0..3 {
                for y in 0..side {
                    for x in 0..side {
                        let at = |v: usize, middle: f32| (v as f32 + 0.5 - middle) / radius;
                        let is_inside = is_in_shape(class, at(x, x0), at(y, y0));
                        let value = if is_inside { inside[plane] } else { outside[plane] };
                        let noise = (random.unit() - 0.5) * 0.25;
                        images.pixels.push(((value + noise) * 255.0).clamp(0.0, 255.0) as u8);
                    }
                }
            }
            images.classes.push(class as u8);
        }
        images
    }

    /// The images of these numbers, `[batch, 3, side, side]`, normalized, and their classes. With `augment` each is
    /// mirrored or not, and moved by up to an eighth of its side, by the seed, the epoch and its number.
    fn batch(
        &self,
        numbers: &[usize],
        augment: Option<(u64, u64)>,
        dtype: DType,
        device: &Device,
    ) -> Result<(Tensor, Tensor)> {
        let side = self.side;
        let mut values = Vec::with_capacity(numbers.len() * 3 * side * side);
        for number in numbers {
            let (mut mirror, mut moved) = (false, [0, 0]);
            if let Some((seed, epoch)) = augment {
                let mut random = Random::of(&[seed, epoch, *number as u64]);
                let most = side / 8;
                mirror = random.below(2) == 1;
                moved = [0; 2].map(|_| random.below(2 * most + 1) as isize - most as isize);
            }
            let image = &self.pixels[number * 3 * side * side..][..3 * side * side];
            for (plane, (mean, deviation)) in image.chunks(side * side).zip(PLANES) {
                for y in 0..side {
                    for x in 0..side {
                        let x = if mirror { side - 1 - x } else { x };
                        let [x, y] = [x as isize + moved[0], y as isize + moved[1]];
                        let is_there = [x, y].iter().all(|v| (0..side as isize).contains(v));
                        let byte = is_there.then(|| plane[y as usize * side + x as usize]);
                        values.push(byte.map_or(0.0, |byte| (f32::from(byte) - mean) / deviation));
                    }
                }
            }
        }
        let classes: Vec<u32> = numbers.iter().map(|number| u32::from(self.classes[*number])).collect();
        let x = Tensor::from_vec(values, (numbers.len(), 3, side, side), device)?.to_dtype(dtype)?;
        Ok((x, Tensor::new(classes, device)?))
    }
}

/// Whether a place, with the shape's middle at 0 and its edge about 1 away, is in the shape of `class`.
fn is_in_shape(class: usize, x: f32, y: f32) -> bool {
    let (from_middle, box_edge) = (x.hypot(y), x.abs().max(y.abs()));
    let bar = |v: f32| ((v + 1.0) * 2.0) as i32 % 2 == 0;
    match class {
        0 => from_middle < 1.0,
        1 => (0.55..1.0).contains(&from_middle),
        2 => box_edge < 0.9,
        3 => (0.5..0.95).contains(&box_edge),
        4 => box_edge < 1.0 && x.abs().min(y.abs()) < 0.28,
        5 => box_edge < 1.0 && (x.abs() - y.abs()).abs() < 0.35,
        6 => box_edge < 1.0 && bar(y),
        7 => box_edge < 1.0 && bar(x),
        8 => box_edge < 1.0 && (bar(x) == bar(y)),
        _ => y.abs() < 0.95 && x.abs() < (y + 1.0) / 2.0,
    }
}

/// `0..len` in an order of the seed and the epoch.
fn shuffled(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut random = Random::of(&[seed, epoch]);
    let mut order: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        order.swap(last, random.below(last + 1));
    }
    order
}

/// SplitMix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    /// The numbers of these words.
    fn of(words: &[u64]) -> Self {
        words.iter().fold(Self(0), |mut random, word| Self(random.next() ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// In [0, 1).
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 24) as f32
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}
