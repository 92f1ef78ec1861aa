//! The files of the page, compiled into the program.

use super::http::ContentKind;

/// A file of the page.
pub(super) struct PageAsset {
    pub(super) path: &'static str,
    pub(super) kind: ContentKind,
    pub(super) bytes: &'static [u8],
}

/// All files.
pub(super) const ASSETS: [PageAsset; 11] = [
    PageAsset { path: "/", kind: ContentKind::Html, bytes: include_bytes!("assets/index.html") },
    PageAsset { path: "/page.css", kind: ContentKind::Style, bytes: include_bytes!("assets/page.css") },
    PageAsset { path: "/page.js", kind: ContentKind::Script, bytes: include_bytes!("assets/page.js") },
    PageAsset { path: "/chart.js", kind: ContentKind::Script, bytes: include_bytes!("assets/chart.js") },
    PageAsset { path: "/series.js", kind: ContentKind::Script, bytes: include_bytes!("assets/series.js") },
    PageAsset { path: "/panels.js", kind: ContentKind::Script, bytes: include_bytes!("assets/panels.js") },
    PageAsset { path: "/sweep.js", kind: ContentKind::Script, bytes: include_bytes!("assets/sweep.js") },
    PageAsset {
        path: "/parallel_coordinates.js",
        kind: ContentKind::Script,
        bytes: include_bytes!("assets/parallel_coordinates.js"),
    },
    PageAsset { path: "/experts.js", kind: ContentKind::Script, bytes: include_bytes!("assets/experts.js") },
    PageAsset { path: "/dom.js", kind: ContentKind::Script, bytes: include_bytes!("assets/dom.js") },
    PageAsset { path: "/icon.svg", kind: ContentKind::Svg, bytes: include_bytes!("assets/icon.svg") },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_refers_only_to_its_own_files_and_makes_no_html_from_text() {
        for asset in ASSETS {
            let text = String::from_utf8_lossy(asset.bytes);
            // XML namespaces look like addresses, but are never requested.
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for forbidden in [
                "http:",
                "https:",
                "//cdn",
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
                "javascript:",
                "onclick=",
                "style=\"",
                "import(",
            ] {
                assert!(!text.contains(forbidden), "{} contains {forbidden}", asset.path);
            }
            for (_, rest) in text.match_indices("src=\"").map(|(at, found)| text.split_at(at + found.len())) {
                let path = rest.split('"').next().unwrap_or_default();
                assert!(ASSETS.iter().any(|asset| asset.path == path), "{path}");
            }
        }
    }
}
