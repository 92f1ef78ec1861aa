//! The results as rows: speeds and efficiencies, as a table and as JSON.

use super::plan::{ScalingKind, ScalingPoint};
use super::rank::RankMeasurement;
use candle_zero::util::{counted, format_bytes};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// The speed of one job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ScalingSpeed {
    /// The median time of a step in milliseconds. A step ends when the last rank has finished it.
    pub(super) step_ms: f64,
    /// The bytes that a rank sends per step, on average.
    pub(super) sent_bytes: f64,
}

impl ScalingSpeed {
    /// Summarizes the measurements of all ranks.
    pub(super) fn of(ranks: &[RankMeasurement]) -> Self {
        let steps = ranks.iter().map(|rank| rank.step_ms.len()).min().unwrap_or_default();
        let slowest = |step: usize| ranks.iter().map(|rank| rank.step_ms[step]).fold(0.0, f64::max);
        let mut times: Vec<f64> = (0..steps).map(slowest).collect();
        times.sort_by(f64::total_cmp);
        let sent: u64 = ranks.iter().map(|rank| rank.sent_bytes).sum();
        Self {
            step_ms: times.get(times.len() / 2).copied().unwrap_or(f64::NAN),
            sent_bytes: sent as f64 / (ranks.len() * steps).max(1) as f64,
        }
    }
}

/// A row of the results.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct MeasuredRow {
    pub(super) scaling: ScalingKind,
    pub(super) stage: u8,
    pub(super) ranks: usize,
    /// The number of sequences per step, over all ranks.
    pub(super) batch: usize,
    /// The number of micro batches per rank and step.
    pub(super) accumulation: usize,
    pub(super) step_ms: f64,
    pub(super) steps_per_s: f64,
    pub(super) tokens_per_s: f64,
    /// The speed per rank, as a fraction of the speed per rank with the smallest number of ranks.
    pub(super) efficiency: f64,
    /// The bytes that a rank sends per step, on average.
    pub(super) sent_bytes: f64,
}

/// The conditions of the measurement.
#[derive(Debug, Clone, Serialize)]
pub(super) struct ScalingSetting {
    pub(super) model: String,
    pub(super) dtype: &'static str,
    /// The number of tokens per sequence.
    pub(super) seq_len: usize,
    /// The number of sequences per rank and micro batch.
    pub(super) micro_batch: usize,
    /// The number of measured steps of each job.
    pub(super) steps: u64,
    /// The number of cores to which each rank is bound; `None` if there are fewer cores than ranks in the largest job.
    pub(super) cores_per_rank: Option<usize>,
}

/// Returns the rows. The points of a curve are compared with its first one.
pub(super) fn rows(points: &[(ScalingPoint, ScalingSpeed)], setting: &ScalingSetting) -> Vec<MeasuredRow> {
    let curves = points.chunk_by(|(a, _), (b, _)| a.kind == b.kind && a.job.stage == b.job.stage);
    let curve_rows = |curve: &[(ScalingPoint, ScalingSpeed)]| {
        let mut base = None;
        let row = |(point, speed): &(ScalingPoint, ScalingSpeed)| {
            let job = point.job;
            let batch = setting.micro_batch * job.accumulation * job.ranks;
            let tokens_per_s = (batch * setting.seq_len) as f64 * 1e3 / speed.step_ms;
            let per_rank = tokens_per_s / job.ranks as f64;
            MeasuredRow {
                scaling: point.kind,
                stage: job.stage,
                ranks: job.ranks,
                batch,
                accumulation: job.accumulation,
                step_ms: speed.step_ms,
                steps_per_s: 1e3 / speed.step_ms,
                tokens_per_s,
                efficiency: per_rank / *base.get_or_insert(per_rank),
                sent_bytes: speed.sent_bytes,
            }
        };
        curve.iter().map(row).collect::<Vec<_>>()
    };
    curves.flat_map(curve_rows).collect()
}

impl ScalingSetting {
    /// Returns the line that describes the measurement.
    pub(super) fn text(&self) -> String {
        let Self { model, dtype, seq_len, micro_batch, steps, cores_per_rank } = self;
        let cores = match cores_per_rank {
            Some(cores) => format!("{} per rank", counted(*cores, "core")),
            None => "ranks share the cores".into(),
        };
        let (sequences, tokens) = (counted(*micro_batch, "sequence"), counted(*seq_len, "token"));
        let steps = counted(*steps, "step");
        format!("{model}, {dtype}, micro batches of {sequences} of {tokens}; medians of {steps}; {cores}")
    }

    /// Formats the rows as a table.
    pub(super) fn table(&self, rows: &[MeasuredRow]) -> String {
        let mut text = format!("{}\n", self.text());
        for rows_of_kind in rows.chunk_by(|a, b| a.scaling == b.scaling) {
            let (kind, batch) = (rows_of_kind[0].scaling, rows_of_kind[0].batch);
            let condition = match kind {
                ScalingKind::Weak => "the same batch per rank".into(),
                ScalingKind::Strong => format!("{} in total", counted(batch, "sequence")),
            };
            // Writing to a String cannot fail.
            _ = writeln!(text, "\n{kind} scaling: {condition}");
            _ = writeln!(
                text,
                "{:>5}{:>7}{:>8}{:>12}{:>13}{:>13}{:>22}",
                "stage", "ranks", "batch", "steps/s", "tokens/s", "efficiency", "sent by a rank/step"
            );
            for row in rows_of_kind {
                let sent = format_bytes(row.sent_bytes.round() as u64);
                _ = writeln!(
                    text,
                    "{:>5}{:>7}{:>8}{:>12.2}{:>13.0}{:>11.1} %{:>22}",
                    row.stage,
                    row.ranks,
                    row.batch,
                    row.steps_per_s,
                    row.tokens_per_s,
                    100.0 * row.efficiency,
                    sent
                );
            }
        }
        text
    }

    /// Returns everything as one JSON object.
    pub(super) fn json(&self, rows: &[MeasuredRow]) -> Value {
        let mut object = json!(self);
        object["rows"] = json!(rows);
        object
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::plan::{points, rank_counts};
    use super::*;

    pub(in super::super) fn setting() -> ScalingSetting {
        ScalingSetting {
            model: "nano".into(),
            dtype: "f32",
            seq_len: 100,
            micro_batch: 2,
            steps: 3,
            cores_per_rank: Some(1),
        }
    }

    /// Returns rows of made-up speeds: a micro batch takes 10 ms, and each additional rank adds 1 ms per step.
    pub(in super::super) fn made_up() -> Vec<MeasuredRow> {
        let kinds = [ScalingKind::Weak, ScalingKind::Strong];
        let points = points(&kinds, &[0, 3], &rank_counts(&[4], 1)).expect("powers of two");
        let speed = |point: ScalingPoint| {
            let job = point.job;
            let extra = (job.ranks - 1) as f64;
            let step_ms = 10.0 * job.accumulation as f64 + extra;
            (point, ScalingSpeed { step_ms, sent_bytes: extra * 1024.0 * f64::from(1 + job.stage) })
        };
        rows(&points.into_iter().map(speed).collect::<Vec<_>>(), &setting())
    }

    #[test]
    fn a_step_ends_with_the_slowest_rank_and_the_median_step_counts() {
        let rank = |step_ms: [f64; 3], sent_bytes| RankMeasurement { step_ms: step_ms.into(), sent_bytes };
        let speed = ScalingSpeed::of(&[rank([1.0, 9.0, 2.0], 300), rank([4.0, 1.0, 3.0], 600)]);
        assert_eq!(speed, ScalingSpeed { step_ms: 4.0, sent_bytes: 150.0 });
    }

    #[test]
    fn the_table_compares_each_curve_with_its_first_point() {
        insta::assert_snapshot!(setting().table(&made_up()), @r"
        nano, f32, micro batches of 2 sequences of 100 tokens; medians of 3 steps; 1 core per rank

        weak scaling: the same batch per rank
        stage  ranks   batch     steps/s     tokens/s   efficiency   sent by a rank/step
            0      1       2      100.00        20000      100.0 %                   0 B
            0      2       4       90.91        36364       90.9 %               1.0 KiB
            0      4       8       76.92        61538       76.9 %               3.0 KiB
            3      1       2      100.00        20000      100.0 %                   0 B
            3      2       4       90.91        36364       90.9 %               4.0 KiB
            3      4       8       76.92        61538       76.9 %              12.0 KiB

        strong scaling: 8 sequences in total
        stage  ranks   batch     steps/s     tokens/s   efficiency   sent by a rank/step
            0      1       8       25.00        20000      100.0 %                   0 B
            0      2       8       47.62        38095       95.2 %               1.0 KiB
            0      4       8       76.92        61538       76.9 %               3.0 KiB
            3      1       8       25.00        20000      100.0 %                   0 B
            3      2       8       47.62        38095       95.2 %               4.0 KiB
            3      4       8       76.92        61538       76.9 %              12.0 KiB
        ");
        let json = setting().json(&made_up());
        assert_eq!((&json["model"], json["rows"].as_array().map(Vec::len)), (&json!("nano"), Some(12)));
        assert_eq!(json["rows"][0]["scaling"], "weak");
        let efficiency = json["rows"][7]["efficiency"].as_f64().unwrap_or_default();
        assert!((efficiency - 40.0 / 21.0 / 2.0).abs() < 1e-12, "{efficiency}");
    }
}
