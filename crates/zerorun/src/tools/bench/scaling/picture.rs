//! The picture of the results: for each kind of scaling, the speed and the efficiency.

use super::plan::ScalingKind;
use super::results::{MeasuredRow, ScalingSetting};
use super::svg_chart::{self, ChartPanel, ChartSeries};

/// The beginning of a picture, by which an earlier one is recognized.
pub(super) const BEGIN: &str = "<svg xmlns=\"http://www.w3.org/2000/svg\" data-source=\"zerorun bench scaling\"";

/// Draws the rows as SVG.
pub(super) fn draw(setting: &ScalingSetting, rows: &[MeasuredRow]) -> String {
    let panels: Vec<ChartPanel> = rows.chunk_by(|a, b| a.scaling == b.scaling).flat_map(panels).collect();
    svg_chart::draw(BEGIN, &format!("Scaling: {}", setting.text()), &panels, 2)
}

/// Returns the panels of one kind of scaling.
fn panels(rows: &[MeasuredRow]) -> [ChartPanel; 2] {
    let curves: Vec<&[MeasuredRow]> = rows.chunk_by(|a, b| a.stage == b.stage).collect();
    let categories: Vec<String> =
        curves.first().into_iter().flat_map(|curve| curve.iter()).map(|row| row.ranks.to_string()).collect();
    let kind = rows[0].scaling;
    let scaling = match kind {
        ScalingKind::Weak => "Weak scaling (same batch per rank)",
        ScalingKind::Strong => "Strong scaling (same batch in total)",
    };
    let series = |value: &dyn Fn(&MeasuredRow) -> f64, ideal: &dyn Fn(&MeasuredRow, &MeasuredRow) -> f64| {
        let stage_series = |curve: &&[MeasuredRow]| ChartSeries {
            name: format!("stage {}", curve[0].stage),
            values: curve.iter().map(value).collect(),
            is_ideal: false,
        };
        let mut series: Vec<ChartSeries> = curves.iter().map(stage_series).collect();
        // The ideal line begins at the fastest of the curves' first points, so a curve can rise above it only if its
        // efficiency exceeds 100 %.
        let best = curves.iter().max_by(|a, b| value(&a[0]).total_cmp(&value(&b[0])));
        series.extend(best.map(|curve| ChartSeries {
            name: "ideal".into(),
            values: curve.iter().map(|row| ideal(&curve[0], row)).collect(),
            is_ideal: true,
        }));
        series
    };
    let panel = |title: String, y_label: &str, series: Vec<ChartSeries>| ChartPanel {
        title,
        x_label: "ranks".into(),
        y_label: y_label.into(),
        categories: categories.clone(),
        series,
    };
    let speed = series(&|row| row.tokens_per_s, &|base, row| base.tokens_per_s * row.ranks as f64 / base.ranks as f64);
    let efficiency = series(&|row| 100.0 * row.efficiency, &|_, _| 100.0);
    [
        panel(format!("{scaling}: speed"), "tokens/s", speed),
        panel(format!("{scaling}: efficiency"), "efficiency in %", efficiency),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::{made_up, setting};
    use super::*;

    #[test]
    fn the_picture_has_a_panel_for_speed_and_for_efficiency_of_each_kind() {
        let svg = draw(&setting(), &made_up());
        assert!(svg.starts_with(BEGIN), "{svg}");
        let count = |text: &str| svg.matches(text).count();
        assert_eq!((count("<g transform"), count("</g>"), count(">ranks</text>")), (4, 4, 4));
        assert_eq!((count(">tokens/s</text>"), count(">efficiency in %</text>")), (2, 2));
        assert_eq!((count(">stage 0</text>"), count(">stage 3</text>"), count(">ideal</text>")), (4, 4, 4));
        // In each of the four panels, each of the two curves has three points, and a marker next to its name.
        assert_eq!((count("<circle "), count(" width=\"8\"")), (16, 16));
        assert!(!svg.contains("NaN"), "{svg}");
    }
}
