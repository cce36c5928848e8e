//! How near two numbers are: by which factor one exceeds the other, and what that is called.

use serde::Serialize;

/// By which factor the larger of two numbers exceeds the other; `None` unless both are above 0 and finite.
pub(super) fn factor(ours: f64, paper: f64) -> Option<f64> {
    let is_number = |n: f64| n > 0.0 && n.is_finite();
    (is_number(ours) && is_number(paper)).then(|| (ours / paper).max(paper / ours))
}

/// In plain words.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Verdict {
    #[serde(rename = "within 1.2x")]
    Close,
    #[serde(rename = "within 1.5x")]
    Near,
    #[serde(rename = "within 2x")]
    Rough,
    #[serde(rename = "off")]
    Off,
}

impl Verdict {
    /// A number that cannot be compared is off.
    pub(super) fn of(ours: f64, paper: f64) -> Self {
        // What is printed with two digits as 1.20 counts as 1.2.
        match factor(ours, paper) {
            Some(factor) if factor < 1.205 => Self::Close,
            Some(factor) if factor < 1.505 => Self::Near,
            Some(factor) if factor < 2.005 => Self::Rough,
            _ => Self::Off,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Close => "within 1.2x",
            Self::Near => "within 1.5x",
            Self::Rough => "within 2x",
            Self::Off => "off",
        }
    }
}

/// How many of some verdicts are how good.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Shares {
    pub(super) all: usize,
    pub(super) within_1_5: usize,
    pub(super) within_2: usize,
}

impl Shares {
    pub(super) fn of(verdicts: impl IntoIterator<Item = Verdict>) -> Self {
        let mut shares = Self::default();
        for verdict in verdicts {
            shares.all += 1;
            shares.within_1_5 += usize::from(verdict <= Verdict::Near);
            shares.within_2 += usize::from(verdict <= Verdict::Rough);
        }
        shares
    }

    pub(super) fn text(self) -> String {
        let percent = |count: usize| 100.0 * count as f64 / self.all.max(1) as f64;
        let Self { all, within_1_5, within_2 } = self;
        format!(
            "{within_1_5} of {all} within 1.5x ({:.0}%), {within_2} of {all} within 2x ({:.0}%)",
            percent(within_1_5),
            percent(within_2)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_does_not_care_which_is_larger() {
        assert_eq!((factor(3.0, 2.0), factor(2.0, 3.0)), (Some(1.5), Some(1.5)));
        for (ours, paper) in [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)] {
            assert_eq!(factor(ours, paper), None, "{ours} and {paper}");
            assert_eq!(Verdict::of(ours, paper), Verdict::Off);
        }
    }

    #[test]
    fn verdicts_change_where_they_say() {
        use Verdict::{Close, Near, Off, Rough};
        let expected =
            [(1.0, Close), (1.2, Close), (1.21, Near), (1.5, Near), (1.51, Rough), (2.0, Rough), (2.01, Off)];
        for (ours, verdict) in expected {
            assert_eq!((Verdict::of(ours, 1.0), Verdict::of(1.0, ours)), (verdict, verdict), "{ours}");
        }
    }

    #[test]
    fn shares_are_cumulative() {
        use Verdict::{Close, Near, Off, Rough};
        let shares = Shares::of([Close, Near, Rough, Off, Off]);
        assert_eq!(shares, Shares { all: 5, within_1_5: 2, within_2: 3 });
        assert_eq!(shares.text(), "2 of 5 within 1.5x (40%), 3 of 5 within 2x (60%)");
        assert_eq!(Shares::of([]).text(), "0 of 0 within 1.5x (0%), 0 of 0 within 2x (0%)");
    }
}
