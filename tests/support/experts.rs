//! A small mixture of experts whose experts can be units, with routes that a test can choose.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use candle_zero::nn::{
    ExpertActivation, ExpertAdapter, ExpertMlp, ExpertProjection, ExpertTensors, GateUpOrder, Linear, RmsNorm,
    RouterOptions, RouterOrder, WeightLayout, add, route,
};
use candle_zero::zero::{Unit, routed_units, unit};
use std::cell::RefCell;
use std::collections::BTreeSet;

pub const WIDTH: usize = 32;
pub const INNER: usize = 32;
pub const PER_ROW: usize = 2;
/// The number of elements of an expert, which has three matrices.
pub const EXPERT: usize = 3 * WIDTH * INNER;

thread_local! {
    static ROUTES: RefCell<Routes> = const { RefCell::new(Routes::Among(Vec::new())) };
    /// The experts that rows of this rank chose, in each forward pass of a block.
    static CHOSEN: RefCell<Vec<BTreeSet<usize>>> = const { RefCell::new(Vec::new()) };
}

/// Returns and clears the experts that rows of this rank have chosen since the last call, in each forward pass of a
/// block.
pub fn take_chosen() -> Vec<BTreeSet<usize>> {
    CHOSEN.take()
}

/// The experts that this rank's routers choose.
enum Routes {
    /// The routers choose among these experts, or among all experts if the list is empty.
    Among(Vec<usize>),
    /// Row `i` chooses [`PER_ROW`] experts: expert `i` and those after it, modulo the number of experts.
    InTurn,
}

/// Limits the experts among which this rank's routers choose from now on.
pub fn allow(experts: impl IntoIterator<Item = usize>) {
    ROUTES.replace(Routes::Among(experts.into_iter().collect()));
}

/// Makes the rows of this rank choose experts by [`Routes::InTurn`] from now on.
pub fn choose_in_turn() {
    ROUTES.replace(Routes::InTurn);
}

impl Routes {
    /// Returns whether a row may choose an expert.
    fn allow(&self, row: usize, expert: usize, experts: usize) -> bool {
        match self {
            Self::Among(among) => among.is_empty() || among.contains(&expert),
            Self::InTurn => (0..PER_ROW).any(|i| (row + i) % experts == expert),
        }
    }
}

/// The structure of a model.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub layers: usize,
    pub experts: usize,
    /// Whether each expert is a unit. Otherwise, all experts are gathered with their block.
    pub units: bool,
    pub checkpointed: bool,
    /// Whether both projections of the experts have an adapter, and the down projection also has a bias.
    pub adapter: bool,
}

pub const SHAPE: Shape = Shape { layers: 2, experts: 8, units: true, checkpointed: false, adapter: false };

struct Block {
    norm: RmsNorm,
    router: Linear,
    experts: ExpertMlp,
}

/// Returns a parameter with random initial values.
fn random(vb: &VarBuilder<'_>, shape: impl Into<candle_core::Shape>, name: &str) -> Result<Tensor> {
    vb.get_with_hints(shape, name, candle_nn::Init::Randn { mean: 0.0, stdev: 0.25 })
}

fn experts(shape: Shape, vb: &VarBuilder<'_>) -> Result<ExpertMlp> {
    let build = |_: usize, vb: VarBuilder<'_>| {
        let gate = random(&vb, (INNER, WIDTH), "gate.weight")?;
        let up = random(&vb, (INNER, WIDTH), "up.weight")?;
        let down = random(&vb, (WIDTH, INNER), "down.weight")?;
        let bias = shape.adapter.then(|| random(&vb, WIDTH, "down.bias")).transpose()?;
        Ok((gate, up, down, bias))
    };
    let (tensors, units) = match shape.units {
        true => routed_units(vb.pp("experts"), shape.experts, build).map(|(tensors, units)| (tensors, Some(units)))?,
        false => {
            let each = |expert: usize| build(expert, vb.pp("experts").pp(expert.to_string()));
            ((0..shape.experts).map(each).collect::<Result<Vec<_>>>()?, None)
        }
    };
    let gates = tensors.iter().map(|(gate, ..)| gate.clone()).collect();
    let ups = tensors.iter().map(|(_, up, ..)| up.clone()).collect();
    let downs = tensors.iter().map(|(_, _, down, _)| down.clone()).collect();
    let biases: Vec<Tensor> = tensors.iter().filter_map(|(.., bias)| bias.clone()).collect();
    let biases = if biases.is_empty() { Vec::new() } else { vec![ExpertTensors::Separate(biases)] };
    let weights = vec![ExpertTensors::Separate(gates), ExpertTensors::Separate(ups)];
    let mut gate_up = ExpertProjection::new(weights, Vec::new(), WeightLayout::OutIn)?;
    let mut down = ExpertProjection::new(vec![ExpertTensors::Separate(downs)], biases, WeightLayout::OutIn)?;
    if shape.adapter {
        let rank = 2;
        let adapter = |vb: VarBuilder<'_>, inputs: usize, outputs: usize| {
            let a = random(&vb, (shape.experts * rank, inputs), "lora_A")?;
            let b = random(&vb, (outputs, shape.experts * rank), "lora_B")?;
            Ok::<_, candle_core::Error>(ExpertAdapter { a, b, scale: 0.5 })
        };
        gate_up = gate_up.with_adapter(adapter(vb.pp("gate_up"), WIDTH, 2 * INNER)?)?;
        down = down.with_adapter(adapter(vb.pp("down"), INNER, WIDTH)?)?;
    }
    let mlp = ExpertMlp::new(gate_up, down, ExpertActivation::Silu, GateUpOrder::Halves)?;
    units.map_or(Ok(mlp.clone()), |units| mlp.with_units(units))
}

/// Returns the result of building an MLP of `experts` experts with `units` units.
pub fn with_units_of(experts: usize, units: usize, vb: &VarBuilder<'_>) -> Result<ExpertMlp> {
    let mlp = self::experts(Shape { experts, units: false, ..SHAPE }, vb)?;
    mlp.with_units(routed_units(vb.pp("units"), units, |_, _| Ok(()))?.1)
}

impl Block {
    fn new(shape: Shape, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            norm: RmsNorm::new(WIDTH, 1e-5, vb.pp("norm"))?,
            router: Linear::from_tensors(random(&vb, (shape.experts, WIDTH), "router.weight")?, None),
            experts: experts(shape, &vb.pp("mlp"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let h = self.norm.forward(x)?;
        let logits = self.router.forward(&h)?;
        let (rows, experts) = (logits.elem_count() / self.experts.experts(), self.experts.experts());
        let bias = ROUTES.with_borrow(|routes| -> Vec<f32> {
            let all = (0..rows).flat_map(|row| (0..experts).map(move |expert| (row, expert)));
            all.map(|(row, expert)| if routes.allow(row, expert, experts) { 0.0 } else { -60.0 }).collect()
        });
        let bias = Tensor::from_vec(bias, logits.shape(), x.device())?.to_dtype(logits.dtype())?;
        let logits = (logits + bias)?;
        let order = RouterOrder::SoftmaxThenTop { renormalize: true };
        let routing = route(&logits, RouterOptions { experts_per_row: PER_ROW, order, keep_f32: false })?;
        CHOSEN.with_borrow_mut(|all| all.push(routing.choices().iter().map(|expert| *expert as usize).collect()));
        // If there are no rows, Candle's addition returns its first operand, without the graph of the second one.
        add(x, &self.experts.forward(&h, &routing)?)
    }
}

/// A linear layer, blocks with experts, and another linear layer.
pub struct Mixture {
    first: Linear,
    blocks: Vec<Unit<Block>>,
    last: Linear,
}

impl Mixture {
    pub fn new(shape: Shape, vb: VarBuilder<'_>) -> Result<Self> {
        let block = |i: usize| {
            Ok(unit(vb.pp(format!("layer.{i}")), |vb| Block::new(shape, vb))?.checkpointed(shape.checkpointed))
        };
        Ok(Self {
            first: Linear::from_tensors(random(&vb, (WIDTH, 4), "first.weight")?, None),
            blocks: (0..shape.layers).map(block).collect::<Result<_>>()?,
            last: Linear::from_tensors(random(&vb, (1, WIDTH), "last.weight")?, None),
        })
    }

    /// Returns the loss of the model without its blocks.
    pub fn loss_without_blocks(&self, x: &Tensor) -> Result<Tensor> {
        self.last.forward(&self.first.forward(x)?)?.sqr()?.sum_all()
    }

    /// Returns a loss, which is finite even if there are no rows.
    pub fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.to_dtype(self.first.weight().dtype())?;
        let x = self.blocks.iter().try_fold(self.first.forward(&x)?, |x, block| block.forward(&x))?;
        let y = self.last.forward(&x)?.to_dtype(DType::F32)?;
        (y - 0.5)?.sqr()?.sum_all()? / 16.0
    }
}

/// Returns the rows of a sample.
pub fn rows(sample: usize, count: usize) -> Tensor {
    let value = |i: usize| ((i * 7 + sample * 5 + i * i * (sample + 1)) % 17) as f32 / 8.0 - 1.0;
    Tensor::from_iter((0..count * 4).map(value), &Device::Cpu).unwrap().reshape((count, 4)).unwrap()
}
