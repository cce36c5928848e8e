//! The paper beside what was measured: a number, a factor and a verdict for every point, as tables and as a page.

use super::paper::{Figure, Metric, Paper, Pick, Ratio, at, same};
use super::plan::{Planned, Slot};
use super::runs::{Runs, command_of};
use super::verdict::{Shares, Verdict, factor};
use crate::page::{
    Document, Folded, Headline, Headlines, Passage, Plot, PlotPoint, PlotSeries, Section, XAxis,
};
use crate::report::Table;
use farwood_fabric::transport::sim::Profile;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{self, Write};

/// Everything that came out.
#[derive(Debug)]
pub(super) struct Outcome<'a> {
    paper: &'a Paper,
    figures: Vec<(&'a Figure, Section)>,
    headlines: Vec<Headline>,
    verdicts: Vec<Verdict>,
}

impl<'a> Outcome<'a> {
    /// Sets the results beside the paper's numbers. All runs of the plan must be there.
    pub(super) fn new(paper: &'a Paper, plan: &[Planned<'a>], runs: &Runs) -> Result<Self, String> {
        let mut outcome = Self { paper, figures: Vec::new(), headlines: Vec::new(), verdicts: Vec::new() };
        for planned in plan {
            let values = Values { planned, runs };
            let section = values.section()?;
            outcome.figures.push((planned.figure, section));
            for ratio in &planned.figure.ratio {
                let Some(ours) = values.ratio(ratio)? else { continue };
                let verdict = Verdict::of(ours, ratio.value);
                outcome.verdicts.push(verdict);
                outcome.headlines.push(Headline {
                    figure: planned.figure.label(),
                    what: ratio.name.clone(),
                    paper: ratio.value,
                    ours: Some(ours),
                    factor: factor(ours, ratio.value),
                    verdict: verdict.name().to_owned(),
                    source: ratio.source.clone(),
                });
            }
        }
        Ok(outcome)
    }

    pub(super) fn shares(&self) -> String {
        format!("Headline ratios of the paper's text: {}.", Shares::of(self.verdicts.iter().copied()).text())
    }

    /// Paper against ours, point by point, then the headline ratios.
    pub(super) fn print(&self, out: &mut impl Write) -> io::Result<()> {
        for (figure, section) in &self.figures {
            writeln!(out, "\n{}", section.title)?;
            let mut table = Table::new(&["", "x", "ours", "paper", "ratio", "verdict"]);
            for plot in &section.plots {
                for series in &plot.series {
                    for point in &series.points {
                        table.row(row(figure, plot, &series.name, point));
                    }
                }
            }
            table.print(out)?;
        }
        writeln!(out, "\nHeadline ratios")?;
        let mut table = Table::new(&["", "ours", "paper", "verdict"]);
        for line in &self.headlines {
            let ours = line.ours.map_or(String::new(), number);
            let what = format!("{}: {}", line.figure, line.what);
            table.row(vec![what, ours, number(line.paper), spoken(&line.verdict, line.factor)]);
        }
        table.print(out)?;
        writeln!(out, "\n{}", self.shares())
    }

    pub(super) fn into_document(self, quick: bool, runs: usize) -> Document {
        let opening =
            vec![self.what_was_run(quick, runs), self.model(), self.what_agrees(), self.what_does_not()];
        let summary = format!(
            "{} A ratio compares two runs of one model, so what the model gets wrong for both cancels out.",
            self.shares()
        );
        Document {
            title: format!("{}: the paper beside the simulator", self.paper.name),
            opening,
            headlines: Some(Headlines { title: "Headline ratios".to_owned(), summary, rows: self.headlines }),
            sections: self.figures.into_iter().map(|(_, section)| section).collect(),
        }
    }

    fn what_was_run(&self, quick: bool, runs: usize) -> Passage {
        let mut paragraphs = vec![format!(
            "{} Below are the figures that it shows, run again in Farwood's simulator: {runs} runs of farwood bench{}. The \
             commands stand under each figure.",
            self.paper.citation,
            if quick { ", with --quick: short windows, few keys, fewer points" } else { "" }
        )];
        paragraphs.extend(self.paper.about.iter().cloned());
        Passage { heading: "What was run".to_owned(), paragraphs, ..Passage::default() }
    }

    fn model(&self) -> Passage {
        let name = self.paper.setting.get("profile").and_then(toml::Value::as_str);
        let name = name.unwrap_or(crate::fleet::World::USUAL);
        let text = "All times are virtual: they come from a model of the network cards, the wire and the clients' own work \
                    with the numbers below, not from the machine that ran it, and the same command gives the same figures to \
                    the last digit. The verbs, round trips, bytes and retries are those of the real code. Points that the model \
                    was fitted to are marked as such; everything else is prediction.";
        let folded = Profile::text(name).map(|profile| Folded {
            title: format!("The numbers of the model ({name}), each with its source"),
            text: profile.to_owned(),
        });
        Passage {
            heading: "On which model".to_owned(),
            paragraphs: vec![text.to_owned()],
            folded,
            ..Passage::default()
        }
    }

    fn what_agrees(&self) -> Passage {
        let mut points = Vec::new();
        for (figure, section) in &self.figures {
            let numbers: Vec<&PlotPoint> = points_of(section).filter(|point| point.paper.is_some()).collect();
            let predicted = numbers.iter().filter(|point| !point.calibrated);
            let near = |point: &&&PlotPoint| point.factor.is_some_and(|factor| factor < 1.505);
            let (all, good) = (predicted.clone().count(), predicted.filter(near).count());
            let fitted = numbers.len() - all;
            let ratios = self.headlines.iter().filter(|line| line.figure == figure.label());
            let (lines, close) = (
                ratios.clone().count(),
                ratios.filter(|line| line.factor.is_some_and(|f| f < 1.505)).count(),
            );
            let mut said = Vec::new();
            if all > 0 {
                said.push(format!("{good} of {all} predicted numbers within 1.5x"));
            }
            if lines > 0 {
                said.push(format!("{close} of {lines} ratios within 1.5x"));
            }
            if fitted > 0 {
                said.push(format!("{fitted} numbers that the model was fitted to"));
            }
            if said.is_empty() {
                said.push("the text gives no numbers for it, so ours stand alone".to_owned());
            }
            points.push(format!("{}: {}.", figure.label(), said.join(", ")));
        }
        let paragraphs = vec![self.shares()];
        Passage { heading: "What agrees".to_owned(), paragraphs, points, folded: None }
    }

    fn what_does_not(&self) -> Passage {
        let off = |line: &&Headline| line.verdict == Verdict::Off.name();
        let points = self.headlines.iter().filter(off).map(|line| {
            let ours = line.ours.map_or("nothing".to_owned(), number);
            format!("{}, {}: the paper says {}, we find {ours}.", line.figure, line.what, number(line.paper))
        });
        let mut points: Vec<String> = points.collect();
        let figures = self.figures.iter().filter(|(figure, _)| {
            let is_off =
                |line: &Headline| line.figure == figure.label() && line.verdict == Verdict::Off.name();
            self.headlines.iter().any(is_off)
        });
        points.extend(figures.map(|(figure, _)| format!("{}: {}", figure.label(), figure.finding)));
        let said = if points.is_empty() {
            "No headline ratio is off by more than 2x."
        } else {
            "These headline ratios are off by more than 2x; behind them, what the figures they belong to suggest as the reason."
        };
        let paragraphs = vec![said.to_owned()];
        Passage {
            heading: "What does not agree, and the likely reason".to_owned(),
            paragraphs,
            points,
            folded: None,
        }
    }
}

fn points_of(section: &Section) -> impl Iterator<Item = &PlotPoint> {
    section.plots.iter().flat_map(|plot| &plot.series).flat_map(|series| &series.points)
}

/// The results of one figure.
struct Values<'a> {
    planned: &'a Planned<'a>,
    runs: &'a Runs,
}

impl Values<'_> {
    fn value(&self, slot: &Slot<'_>, metric: &Metric) -> Result<f64, String> {
        let command = command_of(&slot.words);
        let result = self.runs.get(&slot.words).ok_or_else(|| format!("there is no result of {command}"))?;
        let path = at(&metric.path, slot.x);
        let found = look_up(result, &path).ok_or_else(|| format!("a result has no number at '{path}'"))?;
        Ok(found * metric.scale)
    }

    fn section(&self) -> Result<Section, String> {
        let figure = self.planned.figure;
        let mut plots = Vec::new();
        for panel in &figure.panel {
            for metric in &figure.metric {
                let series =
                    figure.series.iter().map(|series| self.series(&panel.name, &series.name, metric));
                let title = match (panel.name.as_str(), figure.metric.len()) {
                    ("", _) => metric.name.clone(),
                    (panel, 1) => panel.to_owned(),
                    (panel, _) => format!("{panel}: {}", metric.name),
                };
                plots.push(Plot {
                    title,
                    unit: metric.unit.clone(),
                    log: metric.log,
                    x: figure.x.as_ref().map(|x| XAxis { label: x.label.clone(), log: x.log }),
                    series: series.collect::<Result<_, _>>()?,
                });
            }
        }
        let commands: BTreeSet<String> =
            self.planned.slots.iter().map(|slot| command_of(&slot.words)).collect();
        Ok(Section {
            id: format!("figure-{}", figure.id),
            title: format!("{}: {}", figure.label(), figure.title),
            about: figure.about.clone(),
            finding: figure.finding.clone(),
            plots,
            commands: commands.into_iter().collect(),
        })
    }

    fn series(&self, panel: &str, series: &str, metric: &Metric) -> Result<PlotSeries, String> {
        let slots = self.planned.slots.iter().filter(|slot| slot.panel == panel && slot.series == series);
        let point = |slot: &Slot<'_>| {
            let ours = self.value(slot, metric)?;
            let number = self.planned.figure.number(panel, series, slot.x, &metric.name);
            Ok(PlotPoint {
                x: slot.x,
                ours: Some(ours),
                paper: number.map(|number| number.value),
                factor: number.and_then(|number| factor(ours, number.value)),
                verdict: number.map(|number| Verdict::of(ours, number.value).name().to_owned()),
                source: number.map(|number| number.source.clone()),
                calibrated: number.is_some_and(|number| number.calibrated),
            })
        };
        Ok(PlotSeries { name: series.to_owned(), points: slots.map(point).collect::<Result<_, String>>()? })
    }

    /// What a ratio is here; `None` if its point is left out of a quick run.
    fn ratio(&self, ratio: &Ratio) -> Result<Option<f64>, String> {
        let figure = self.planned.figure;
        let metric = figure.metric.iter().find(|metric| metric.name == ratio.metric);
        let metric = metric.ok_or("a ratio without a metric")?;
        let panel = ratio.panel.as_deref().unwrap_or("");
        let values = |series: &str| -> Result<Vec<f64>, String> {
            let is_meant = |slot: &&Slot<'_>| {
                let at_x = ratio.x.is_none_or(|x| same(slot.x, x));
                slot.panel == panel && slot.series == series && at_x
            };
            self.planned.slots.iter().filter(is_meant).map(|slot| self.value(slot, metric)).collect()
        };
        let (of, over) = (values(&ratio.of)?, values(&ratio.over)?);
        let largest = |values: &[f64]| values.iter().copied().reduce(f64::max);
        Ok(match ratio.pick {
            Pick::Peak => largest(&of).zip(largest(&over)).map(|(of, over)| of / over),
            Pick::Largest => largest(&of.iter().zip(&over).map(|(of, over)| of / over).collect::<Vec<_>>()),
        })
    }
}

/// A number in a result, by its path.
pub(super) fn look_up(result: &Value, path: &str) -> Option<f64> {
    path.split('.').try_fold(result, |value, name| value.get(name))?.as_f64()
}

/// A line of the table of a figure.
fn row(figure: &Figure, plot: &Plot, series: &str, point: &PlotPoint) -> Vec<String> {
    let x = if figure.has_x() { format!("{}", point.x) } else { String::new() };
    let ours = point.ours.map_or(String::new(), |ours| format!("{} {}", number(ours), plot.unit));
    let ratio =
        point.ours.zip(point.paper).map_or(String::new(), |(ours, paper)| format!("{:.2}", ours / paper));
    let verdict = match &point.verdict {
        Some(_) if point.calibrated => "fitted to".to_owned(),
        Some(verdict) => spoken(verdict, point.factor),
        None => "not in the text".to_owned(),
    };
    vec![
        format!("{}, {series}", plot.title),
        x,
        ours,
        point.paper.map_or(String::new(), number),
        ratio,
        verdict,
    ]
}

fn spoken(verdict: &str, factor: Option<f64>) -> String {
    match factor {
        Some(factor) if verdict == Verdict::Off.name() => format!("off {factor:.1}x"),
        _ => verdict.to_owned(),
    }
}

/// Three digits that count, or four: shares near 100% differ there.
fn number(value: f64) -> String {
    match value.abs() {
        n if n >= 100.0 => format!("{value:.0}"),
        n if n >= 0.1 || n == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.5}"),
    }
}
