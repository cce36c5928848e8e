//! A page that shows measurements: one HTML file that needs nothing else, offline, light and dark, on a wide screen and on a phone.
//!
//! The page is a fixed frame (`page.html`, `page.css`, `page.js`) around a [`Document`], which is embedded as JSON and
//! written beside it, too; the script draws everything from that. What goes wrong in the script is noted in the
//! attribute `data-errors` of the page, where a test finds it.

use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};

const FRAME: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// All that a page shows.
#[derive(Serialize, Default, Debug)]
pub(crate) struct Document {
    pub(crate) title: String,
    /// What a reader must know to trust the rest.
    pub(crate) opening: Vec<Passage>,
    pub(crate) headlines: Option<Headlines>,
    pub(crate) sections: Vec<Section>,
}

/// A heading with paragraphs, points, and text that can be unfolded.
#[derive(Serialize, Default, Debug)]
pub(crate) struct Passage {
    pub(crate) heading: String,
    pub(crate) paragraphs: Vec<String>,
    pub(crate) points: Vec<String>,
    pub(crate) folded: Option<Folded>,
}

#[derive(Serialize, Debug)]
pub(crate) struct Folded {
    pub(crate) title: String,
    pub(crate) text: String,
}

/// A table of what matters most.
#[derive(Serialize, Debug)]
pub(crate) struct Headlines {
    pub(crate) title: String,
    pub(crate) summary: String,
    pub(crate) rows: Vec<Headline>,
}

#[derive(Serialize, Debug)]
pub(crate) struct Headline {
    pub(crate) figure: String,
    pub(crate) what: String,
    pub(crate) paper: f64,
    pub(crate) ours: Option<f64>,
    pub(crate) factor: Option<f64>,
    pub(crate) verdict: String,
    pub(crate) source: String,
}

/// One figure: plots of one kind, with a table under each.
#[derive(Serialize, Debug)]
pub(crate) struct Section {
    pub(crate) id: String,
    pub(crate) title: String,
    pub(crate) about: String,
    pub(crate) finding: String,
    pub(crate) plots: Vec<Plot>,
    pub(crate) commands: Vec<String>,
}

#[derive(Serialize, Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) unit: String,
    /// Whether the axis of values is logarithmic.
    pub(crate) log: bool,
    /// Without it, a plot has one value for each series.
    pub(crate) x: Option<XAxis>,
    pub(crate) series: Vec<PlotSeries>,
}

#[derive(Serialize, Clone, Debug)]
pub(crate) struct XAxis {
    pub(crate) label: String,
    pub(crate) log: bool,
}

#[derive(Serialize, Debug)]
pub(crate) struct PlotSeries {
    pub(crate) name: String,
    pub(crate) points: Vec<PlotPoint>,
}

#[derive(Serialize, Default, Debug)]
pub(crate) struct PlotPoint {
    pub(crate) x: f64,
    pub(crate) ours: Option<f64>,
    pub(crate) paper: Option<f64>,
    pub(crate) factor: Option<f64>,
    pub(crate) verdict: Option<String>,
    pub(crate) source: Option<String>,
    /// The model was fitted to it.
    pub(crate) calibrated: bool,
}

impl Document {
    pub(crate) fn to_json(&self) -> Result<String, String> {
        serde_json::to_string(self).map_err(|error| error.to_string())
    }

    /// The whole page.
    pub(crate) fn to_html(&self) -> Result<String, String> {
        // Within a script element only '<' can end it, or begin a comment; JSON has it in strings alone, where it can be escaped.
        let json = self.to_json()?.replace('<', "\\u003c");
        let fill = |name: &str| match name {
            "title" => escaped(&self.title),
            "style" => STYLE.to_owned(),
            "script" => SCRIPT.to_owned(),
            _ => json.clone(),
        };
        let mut parts = FRAME.split("{{");
        let mut page = parts.next().unwrap_or_default().to_owned();
        for (name, rest) in parts.filter_map(|part| part.split_once("}}")) {
            page.push_str(&fill(name));
            page.push_str(rest);
        }
        Ok(page)
    }

    /// Writes the page, and the JSON beside it; where that is.
    pub(crate) fn write(&self, html: &Path) -> Result<PathBuf, String> {
        let json = html.with_extension("json");
        replace(&json, &self.to_json()?)?;
        replace(html, &self.to_html()?)?;
        Ok(json)
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Replaces a file as a whole: whoever reads it sees the old one or the new one.
fn replace(path: &Path, text: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot write {}: {error}", path.display());
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let mut file = std::fs::File::create(&new).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    std::fs::rename(&new, path).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_document_ends_its_script() {
        let title = "a </script><!-- & 'b' {{data}}".to_owned();
        let page = Document { title, ..Document::default() }.to_html().unwrap();
        assert_eq!(page.matches("</script").count(), 2, "the data's and the script's own");
        assert!(page.contains("<title>a &lt;/script&gt;&lt;!-- &amp; 'b' {{data}}</title>"));
        assert!(!page.contains("<!-- &"));
    }

    #[test]
    fn a_page_needs_nothing_from_elsewhere() {
        let page = Document::default().to_html().unwrap();
        for outside in ["src=", "href=\"http", "@import", "url(", "fetch(", "XMLHttpRequest"] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert!(
            page.contains("\"sections\":[]")
                && page.contains("prefers-color-scheme")
                && page.contains("onerror")
        );
    }
}
