//! A paper as data: what it measured, how that is run here, and the numbers that its text gives, each with its place.
//!
//! A file in `papers/` is a paper; adding one is adding a file and its name to [`PAPERS`]. A figure is the product of its
//! panels, series and points, each a few options of `farwood bench`; later ones replace earlier ones:
//!
//! 1. the paper's `setting`, and its `quick` with `--quick`; 2. the figure's, 3. the series', 4. the panel's, likewise; 5. the
//!    point's. `{x}` in an option, or in a metric's path, stands for the point's x.
//!
//! So every run is a command that anybody can repeat, and two figures that show the same run share it. A metric is a
//! path into what `farwood bench --json` writes.

use super::verdict::factor;
use serde::Deserialize;
use std::collections::BTreeMap;

/// The papers by name.
pub(super) const PAPERS: [(&str, &str); 2] =
    [("sherman", include_str!("papers/sherman.toml")), ("sphinx", include_str!("papers/sphinx.toml"))];

/// Options of `farwood bench` by name; `set` holds the engine's switches.
pub(super) type Options = BTreeMap<String, toml::Value>;

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Paper {
    pub(super) name: String,
    /// Title, authors, venue.
    pub(super) citation: String,
    /// What is simulated, and what is not as in the paper.
    pub(super) about: Vec<String>,
    pub(super) setting: Options,
    #[serde(default)]
    pub(super) quick: Options,
    pub(super) figure: Vec<Figure>,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Figure {
    /// Its number, and a letter if it has several parts: `15c`; tables are `table1`.
    pub(super) id: String,
    /// What it is called, if the id does not say it.
    pub(super) label: Option<String>,
    pub(super) title: String,
    /// How the paper ran it, and how it is run here.
    pub(super) about: String,
    /// What agrees, what does not, and the likely reason: written by somebody who looked at the numbers.
    pub(super) finding: String,
    #[serde(default)]
    pub(super) setting: Options,
    #[serde(default)]
    pub(super) quick: Options,
    #[serde(default = "Panel::only")]
    pub(super) panel: Vec<Panel>,
    pub(super) series: Vec<Series>,
    #[serde(default = "Point::only")]
    pub(super) point: Vec<Point>,
    /// What x is, where there are several points.
    pub(super) x: Option<Axis>,
    pub(super) metric: Vec<Metric>,
    /// Numbers of the paper's text.
    #[serde(default)]
    pub(super) paper: Vec<Number>,
    /// Ratios of the paper's text.
    #[serde(default)]
    pub(super) ratio: Vec<Ratio>,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct Panel {
    pub(super) name: String,
    #[serde(default)]
    pub(super) setting: Options,
    #[serde(default)]
    pub(super) quick: Options,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct Series {
    pub(super) name: String,
    #[serde(default)]
    pub(super) setting: Options,
    #[serde(default)]
    pub(super) quick: Options,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Point {
    pub(super) x: f64,
    #[serde(default)]
    pub(super) setting: Options,
    /// Left out with `--quick`.
    #[serde(default)]
    pub(super) full_only: bool,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct Axis {
    pub(super) label: String,
    #[serde(default)]
    pub(super) log: bool,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct Metric {
    pub(super) name: String,
    /// Where a result has it: names with dots between them.
    pub(super) path: String,
    pub(super) unit: String,
    /// What the number is multiplied by to have that unit.
    #[serde(default = "one")]
    pub(super) scale: f64,
    #[serde(default)]
    pub(super) log: bool,
}

/// A number of the paper's text.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct Number {
    pub(super) panel: Option<String>,
    pub(super) series: String,
    pub(super) x: Option<f64>,
    pub(super) metric: String,
    pub(super) value: f64,
    /// Where it stands, and how it follows if it is not there as such.
    pub(super) source: String,
    /// The model was fitted to it.
    #[serde(default)]
    pub(super) calibrated: bool,
}

/// A ratio of the paper's text: a metric of one series over that of another.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct Ratio {
    pub(super) name: String,
    pub(super) panel: Option<String>,
    pub(super) of: String,
    pub(super) over: String,
    pub(super) metric: String,
    /// At this point; without it, as `pick` says.
    pub(super) x: Option<f64>,
    #[serde(default)]
    pub(super) pick: Pick,
    pub(super) value: f64,
    pub(super) source: String,
}

/// Which points a ratio without an x is about.
#[derive(Deserialize, Clone, Copy, PartialEq, Eq, Default, Debug)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Pick {
    /// The largest value of each series.
    #[default]
    Peak,
    /// The point at which the ratio is largest.
    Largest,
}

fn one() -> f64 {
    1.0
}

impl Panel {
    fn only() -> Vec<Self> {
        vec![Self { name: String::new(), setting: Options::new(), quick: Options::new() }]
    }
}

impl Point {
    fn only() -> Vec<Self> {
        vec![Self { x: 0.0, setting: Options::new(), full_only: false }]
    }
}

impl Paper {
    /// Reads a paper and checks it.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let paper: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        for figure in &paper.figure {
            figure.check().map_err(|why| format!("figure {}: {why}", figure.id))?;
        }
        Ok(paper)
    }

    /// The figures of this number, or of this number and letter; all, if none is asked for.
    pub(super) fn figures(&self, wanted: &[String]) -> Result<Vec<&Figure>, String> {
        if let Some(unknown) = wanted.iter().find(|id| !self.figure.iter().any(|figure| figure.is(id))) {
            let ids: Vec<_> = self.figure.iter().map(|figure| figure.id.as_str()).collect();
            return Err(format!("--figure: there is no {unknown}; there are {}", ids.join(", ")));
        }
        Ok(self.figure.iter().filter(|f| wanted.is_empty() || wanted.iter().any(|id| f.is(id))).collect())
    }
}

impl Figure {
    /// Whether it goes by this name: `15c`, or `15` for all its parts.
    fn is(&self, name: &str) -> bool {
        self.id == name || self.id.trim_end_matches(|c: char| c.is_ascii_lowercase()) == name
    }

    /// What it is called in a table: `Figure 15c`, `Table 1`.
    pub(super) fn label(&self) -> String {
        match (&self.label, self.id.strip_prefix("table")) {
            (Some(label), _) => label.clone(),
            (None, Some(number)) => format!("Table {number}"),
            (None, None) => format!("Figure {}", self.id),
        }
    }

    pub(super) fn points(&self, quick: bool) -> impl Iterator<Item = &Point> {
        self.point.iter().filter(move |point| !(quick && point.full_only))
    }

    /// Whether it shows something over x.
    pub(super) fn has_x(&self) -> bool {
        self.point.len() > 1
    }

    /// The number that the paper's text gives for a point.
    pub(super) fn number(&self, panel: &str, series: &str, x: f64, metric: &str) -> Option<&Number> {
        self.paper.iter().find(|number| {
            number.series == series
                && number.metric == metric
                && number.panel.as_deref().unwrap_or("") == panel
                && (!self.has_x() || number.x.is_some_and(|at| same(at, x)))
        })
    }

    /// Everything that is named must exist, and every number must say where it stands.
    fn check(&self) -> Result<(), String> {
        let series = |name: &str| self.series.iter().any(|series| series.name == name);
        let panel = |name: &Option<String>| {
            let name = name.as_deref().unwrap_or("");
            self.panel.iter().any(|panel| panel.name == name)
        };
        let metric = |name: &str| self.metric.iter().any(|metric| metric.name == name);
        let point = |x: Option<f64>| x.is_none_or(|x| self.point.iter().any(|point| same(point.x, x)));
        let known = |what: &str, is_known: bool| {
            if is_known { Ok(()) } else { Err(format!("{what} names something that is not in the figure")) }
        };
        let has_source = |what: &str, source: &str, value: f64| {
            let names_a_place = ["Section", "Table", "Figure"].iter().any(|word| source.contains(word));
            if names_a_place && factor(1.0, value).is_some() {
                return Ok(());
            }
            Err(format!("{what} needs a number above 0 and its section, table or figure"))
        };
        for number in &self.paper {
            let what = format!("the number {} of {}", number.value, number.series);
            let exists = series(&number.series) && panel(&number.panel) && metric(&number.metric);
            known(&what, exists && point(number.x) && (number.x.is_some() || !self.has_x()))?;
            has_source(&what, &number.source, number.value)?;
        }
        for ratio in &self.ratio {
            let what = format!("the ratio '{}'", ratio.name);
            let exists = series(&ratio.of) && series(&ratio.over) && panel(&ratio.panel);
            known(&what, exists && metric(&ratio.metric) && point(ratio.x))?;
            has_source(&what, &ratio.source, ratio.value)?;
        }
        if self.has_x() != self.x.is_some() {
            return Err("x is given if there are several points, and only then".to_owned());
        }
        Ok(())
    }
}

/// Whether two points are the same; both come from one file.
pub(super) fn same(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

/// The words of a command, from options of which later ones replace earlier ones.
pub(super) fn command(layers: &[&Options], x: f64) -> Vec<String> {
    let (mut options, mut switches) = (BTreeMap::new(), BTreeMap::new());
    for (name, value) in layers.iter().flat_map(|layer| layer.iter()) {
        match value.as_table() {
            Some(table) => switches.extend(table.iter()),
            None => drop(options.insert(name, value)),
        }
    }
    let mut words = Vec::new();
    for (name, value) in options {
        match value {
            toml::Value::Boolean(true) => words.push(format!("--{name}")),
            toml::Value::Boolean(false) => {}
            value => words.extend([format!("--{name}"), text(value, x)]),
        }
    }
    for (name, value) in switches {
        words.extend(["--set".to_owned(), format!("{name}={}", text(value, x))]);
    }
    words
}

/// A value as it stands in a command.
fn text(value: &toml::Value, x: f64) -> String {
    match value {
        toml::Value::String(text) => at(text, x),
        toml::Value::Boolean(switch) => switch.to_string(),
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Float(number) => number.to_string(),
        // Nothing else has a place in a command; the bench will say what it thinks of it.
        other => format!("{other:?}"),
    }
}

/// A text at some x.
pub(super) fn at(text: &str, x: f64) -> String {
    text.replace("{x}", &x.to_string())
}
