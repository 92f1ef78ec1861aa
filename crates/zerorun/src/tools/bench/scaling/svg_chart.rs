//! Line charts as SVG: panels in rows and columns, readable without colour.
//!
//! Each series has its own pattern of dashes and, unless it is an ideal one, its own marker. The name of a series is
//! near the end of its line. The categories of the x axis, which are numbers of ranks, are equally spaced.

use std::fmt::Write as _;

/// A chart with its axes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ChartPanel {
    pub(super) title: String,
    pub(super) x_label: String,
    pub(super) y_label: String,
    /// The labels of the x axis.
    pub(super) categories: Vec<String>,
    pub(super) series: Vec<ChartSeries>,
}

/// A line in a chart.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ChartSeries {
    pub(super) name: String,
    /// A value for each category.
    pub(super) values: Vec<f64>,
    pub(super) is_ideal: bool,
}

/// The width and the height of a panel, and the margins around its axes, in pixels.
const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 84.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 52.0;
/// The height of the heading above all panels.
const HEADING: f64 = 40.0;
/// The minimum distance between two names at the ends of lines.
const NAME_DISTANCE: f64 = 14.0;
/// The patterns of dashes and the colours of series. The colours differ in brightness, too.
const DASHES: [&str; 4] = ["none", "8 4", "2 4", "10 4 2 4"];
const COLORS: [&str; 4] = ["#1b3a6b", "#a8410a", "#2f7d4f", "#8257a5"];

/// Draws panels in rows of `columns`, below a heading. `begin` is the beginning of the `<svg>` tag.
pub(super) fn draw(begin: &str, heading: &str, panels: &[ChartPanel], columns: usize) -> String {
    let rows = panels.len().div_ceil(columns);
    let (width, height) = (WIDTH * columns as f64, HEADING + HEIGHT * rows as f64);
    let heading = escaped(heading);
    let mut svg = format!(
        "{begin} viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<title>{heading}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"25\" font-size=\"13\">{heading}</text>\n"
    );
    for (number, panel) in panels.iter().enumerate() {
        let (x, y) = (WIDTH * (number % columns) as f64, HEADING + HEIGHT * (number / columns) as f64);
        // Writing to a String cannot fail.
        _ = writeln!(svg, "<g transform=\"translate({x} {y})\">\n{}</g>", panel.body());
    }
    svg + "</svg>\n"
}

impl ChartPanel {
    fn body(&self) -> String {
        let largest = self.series.iter().flat_map(|series| &series.values).copied().filter(|v| v.is_finite());
        let (step, count) = scale(largest.fold(0.0, f64::max));
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let x = |index: usize| match self.categories.len() {
            0 | 1 => (LEFT + right) / 2.0,
            count => LEFT + 16.0 + (right - LEFT - 32.0) * index as f64 / (count - 1) as f64,
        };
        let y = |value: f64| bottom - (bottom - TOP) * value / (step * count as f64);
        let mut svg = format!(
            "<text x=\"{LEFT}\" y=\"22\" font-weight=\"bold\">{}</text>\n\
             <path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#000000\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
             <text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
            escaped(&self.title),
            (LEFT + right) / 2.0,
            HEIGHT - 12.0,
            escaped(&self.x_label),
            (TOP + bottom) / 2.0,
            escaped(&self.y_label),
        );
        for tick in 0..=count {
            let value = step * tick as f64;
            let at = y(value);
            _ = writeln!(
                svg,
                "<path d=\"M{LEFT} {at:.1}H{right}\" stroke=\"#d8d8d8\"/><text x=\"{:.1}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                at + 4.0,
                with_separators(value, step)
            );
        }
        for (index, label) in self.categories.iter().enumerate() {
            let (at, below) = (x(index), bottom + 18.0);
            let label = escaped(label);
            _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{below:.1}\" text-anchor=\"middle\">{label}</text>");
        }
        let mut ends = Vec::new();
        for (number, series) in self.series.iter().enumerate() {
            let points: Vec<(f64, f64)> =
                series.values.iter().enumerate().filter(|(_, v)| v.is_finite()).map(|(i, v)| (x(i), y(*v))).collect();
            svg.push_str(&line(&points, number, series.is_ideal));
            ends.extend(points.last().map(|end| (end.1, end.0, number)));
        }
        // Names that would overlap are moved down; then, beginning with the lowest, names are moved up until all are
        // inside the panel.
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut heights: Vec<f64> = ends.iter().map(|end| end.0).collect();
        for at in 1..heights.len() {
            heights[at] = heights[at].max(heights[at - 1] + NAME_DISTANCE);
        }
        let mut lowest = bottom;
        for height in heights.iter_mut().rev() {
            *height = height.min(lowest);
            lowest = *height - NAME_DISTANCE;
        }
        // Each name has the marker of its series, because the name is not always at the end of its line.
        for ((_, at, number), height) in ends.iter().zip(heights) {
            let series = &self.series[*number];
            if !series.is_ideal {
                svg.push_str(&marker(at + 16.0, height, *number));
            }
            let (at, name) = (at + 24.0, escaped(&series.name));
            _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{:.1}\">{name}</text>", height + 4.0);
        }
        svg
    }
}

/// Draws the line and the markers of a series.
fn line(points: &[(f64, f64)], number: usize, is_ideal: bool) -> String {
    let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
    let path = path.join("L");
    if path.is_empty() {
        return String::new();
    }
    if is_ideal {
        return format!("<path d=\"M{path}\" fill=\"none\" stroke=\"#808080\" stroke-dasharray=\"1 3\"/>\n");
    }
    let (color, dashes) = (COLORS[number % COLORS.len()], DASHES[number % DASHES.len()]);
    let mut svg = format!(
        "<path d=\"M{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\"/>\n"
    );
    points.iter().for_each(|(x, y)| svg.push_str(&marker(*x, *y, number)));
    svg
}

/// Draws the marker of a series.
fn marker(x: f64, y: f64, number: usize) -> String {
    let shape = match number % 4 {
        0 => format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\""),
        1 => format!("<rect x=\"{:.1}\" y=\"{:.1}\" width=\"8\" height=\"8\"", x - 4.0, y - 4.0),
        2 => format!("<path d=\"M{:.1} {:.1}h10l-5 -9z\"", x - 5.0, y + 4.0),
        _ => format!("<path d=\"M{x:.1} {:.1}l5 5l-5 5l-5 -5z\"", y - 5.0),
    };
    format!("{shape} fill=\"{}\"/>\n", COLORS[number % COLORS.len()])
}

/// Returns the distance between the ticks of an axis from 0 to `largest`, and the number of ticks without the one at 0.
fn scale(largest: f64) -> (f64, u32) {
    if !(largest > 0.0 && largest.is_finite()) {
        return (1.0, 1);
    }
    let rough = largest / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].iter().map(|step| step * power).find(|step| *step >= rough * (1.0 - 1e-9));
    let step = step.unwrap_or(10.0 * power);
    (step, ((largest / step) * (1.0 - 1e-9)).ceil().clamp(1.0, 10.0) as u32)
}

/// Formats a tick, with commas between thousands.
fn with_separators(value: f64, step: f64) -> String {
    let decimals = if step >= 1.0 { 0 } else { (-step.log10().floor()).clamp(0.0, 9.0) as usize };
    let text = format!("{value:.decimals$}");
    let (integer, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut out = String::new();
    for (index, digit) in integer.chars().enumerate() {
        if index > 0 && (integer.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out + rest
}

/// Returns a text in which the characters that have a meaning in markup are escaped.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(values: &[&[f64]]) -> ChartPanel {
        let series = |(number, values): (usize, &&[f64])| ChartSeries {
            name: format!("stage {number} & <more>"),
            values: values.to_vec(),
            is_ideal: false,
        };
        ChartPanel {
            title: "a \"title\"".into(),
            x_label: "ranks".into(),
            y_label: "tokens/s".into(),
            categories: ["1", "2", "4"].map(String::from).into(),
            series: values.iter().enumerate().map(series).collect(),
        }
    }

    #[test]
    fn ticks_have_round_distances_and_reach_the_largest_value() {
        for (largest, step, count) in
            [(100.0, 20.0, 5), (101.0, 50.0, 3), (7.0, 2.0, 4), (0.3, 0.1, 3), (1e6, 2e5, 5), (0.0, 1.0, 1)]
        {
            let found = scale(largest);
            assert!((found.0 - step).abs() < 1e-9 * step && found.1 == count, "{largest}: {found:?}");
            assert!(found.0 * f64::from(found.1) >= largest * (1.0 - 1e-9));
        }
        assert_eq!(with_separators(1_234_567.0, 1.0), "1,234,567");
        assert_eq!(with_separators(0.25, 0.05), "0.25");
    }

    #[test]
    fn every_series_has_a_marker_a_pattern_and_a_name_and_text_is_escaped() {
        let values: [&[f64]; 4] = [&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0], &[1.0, f64::NAN, 3.0], &[0.5, 0.6, 0.7]];
        let svg = draw("<svg", "heading", &[panel(&values)], 1);
        for part in ["<circle ", "<rect x=", "h10l-5 -9z", "l5 5l-5 5l-5 -5z", "\"8 4\"", "\"2 4\"", "\"10 4 2 4\""] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert!(svg.contains("stage 3 &amp; &lt;more&gt;") && svg.contains("a &quot;title&quot;"), "{svg}");
        assert!(!svg.contains("NaN"), "{svg}");
        // If they were not moved, three names would be at the same height.
        let heights: Vec<f64> = svg
            .lines()
            .filter(|line| line.contains("stage "))
            .filter_map(|line| line.split("y=\"").nth(1)?.split('"').next()?.parse().ok())
            .collect();
        assert_eq!(heights.len(), 4);
        assert!(heights.windows(2).all(|pair| pair[1] - pair[0] >= NAME_DISTANCE - 0.11), "{heights:?}");
    }

    #[test]
    fn a_chart_without_values_is_drawn_too() {
        let svg = draw("<svg", "", &[panel(&[&[f64::NAN], &[]])], 2);
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
