//! What has to be run for a figure: its panels, series and points multiplied out, each a command of the bench.

use super::paper::{Figure, Options, Paper, command};
use super::runs::Wanted;
use crate::bench::Order;

/// A figure, and what it is made of.
#[derive(Debug)]
pub(super) struct Planned<'a> {
    pub(super) figure: &'a Figure,
    pub(super) slots: Vec<Slot<'a>>,
}

/// One place in a figure, and the words of the run that fills it.
#[derive(Debug)]
pub(super) struct Slot<'a> {
    pub(super) panel: &'a str,
    pub(super) series: &'a str,
    pub(super) x: f64,
    pub(super) words: Vec<String>,
}

impl<'a> Planned<'a> {
    pub(super) fn new(paper: &'a Paper, figure: &'a Figure, quick: bool) -> Self {
        let none = Options::new();
        let mut slots = Vec::new();
        for panel in &figure.panel {
            for series in &figure.series {
                for point in figure.points(quick) {
                    let pairs = [
                        (&paper.setting, &paper.quick),
                        (&figure.setting, &figure.quick),
                        (&series.setting, &series.quick),
                        (&panel.setting, &panel.quick),
                        (&point.setting, &none),
                    ];
                    let layers =
                        pairs.map(|(setting, quicker)| [setting, if quick { quicker } else { &none }]);
                    let words = command(layers.as_flattened(), point.x);
                    slots.push(Slot { panel: &panel.name, series: &series.name, x: point.x, words });
                }
            }
        }
        Self { figure, slots }
    }

    /// Checks every command; what is wanted.
    pub(super) fn wanted(&self) -> Result<Vec<Wanted>, String> {
        let wanted = |slot: &Slot<'_>| {
            let mut label = self.figure.label();
            for part in [slot.panel, slot.series].iter().filter(|part| !part.is_empty()) {
                label = format!("{label}, {part}");
            }
            if self.figure.has_x() {
                label = format!("{label}, {}", slot.x);
            }
            let order = Order::parse(&slot.words).map_err(|why| format!("{label}: {why}"))?;
            Ok(Wanted { words: slot.words.clone(), order, label })
        };
        self.slots.iter().map(wanted).collect()
    }
}
