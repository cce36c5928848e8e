//! What was measured, as a distribution: latencies in nanoseconds, round trips, bytes, retries per operation.
//!
//! A wrapper around `hdrhistogram` for three reasons: recording cannot fail, mean and maximum are exact (the histogram's own
//! are those of its buckets), and every table in Farwood shows the same figures. Quantiles are exact below 2048 and within 0.1%
//! above, so small counts such as round trips are exact.

use hdrhistogram::Histogram;
use std::fmt;

/// A distribution of whole numbers. Each thread fills its own; [`Distribution::merge`] adds them up.
#[derive(Clone, Debug)]
pub struct Distribution {
    histogram: Histogram<u64>,
    sum: u128,
    min: u64,
    max: u64,
}

/// A distribution as it travels between processes.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Exported {
    /// Values, or buckets by their largest value, with how often they were recorded.
    pub buckets: Vec<(u64, u64)>,
    /// The sum of all values.
    pub sum: u128,
    /// The smallest; the largest number there is, if there are no values.
    pub min: u64,
    /// The largest.
    pub max: u64,
}

/// The figures that every table shows. All are 0 if nothing was recorded.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
#[expect(
    missing_docs,
    reason = "the names say it; quantiles are the smallest values that so many reach or stay below"
)]
pub struct Summary {
    pub count: u64,
    pub mean: f64,
    pub min: u64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
}

impl Distribution {
    /// Nothing yet.
    pub fn new() -> Self {
        // Three digits are within the one to five that are allowed. Without a bound it grows as needed.
        let histogram = Histogram::new(3).expect("three significant digits are valid");
        Self { histogram, sum: 0, min: u64::MAX, max: 0 }
    }

    /// Adds one value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        self.record_many(value, 1);
    }

    /// Adds one value several times.
    #[inline]
    pub fn record_many(&mut self, value: u64, times: u64) {
        if times == 0 {
            return;
        }
        // It grows to hold the value; not `saturating_record_n`, which does not.
        self.histogram.record_n(value, times).expect("a growing histogram holds every value");
        self.sum += u128::from(value) * u128::from(times);
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// Adds all values of another.
    pub fn merge(&mut self, other: &Distribution) {
        // It grows to hold them; there is nothing to fail.
        self.histogram.add(&other.histogram).expect("a growing histogram holds what another holds");
        self.sum += other.sum;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// All there is to it, for a process that adds it to its own.
    pub fn export(&self) -> Exported {
        let Self { sum, min, max, .. } = *self;
        Exported { buckets: self.buckets().collect(), sum, min, max }
    }

    /// Adds what another process exported. As exact as [`Distribution::merge`].
    pub fn import(&mut self, exported: &Exported) {
        for (value, times) in &exported.buckets {
            self.histogram.record_n(*value, *times).expect("a growing histogram holds every value");
        }
        self.sum += exported.sum;
        self.min = self.min.min(exported.min);
        self.max = self.max.max(exported.max);
    }

    /// Forgets everything, for instance what the warm-up recorded.
    pub fn clear(&mut self) {
        self.histogram.reset();
        (self.sum, self.min, self.max) = (0, u64::MAX, 0);
    }

    /// How many values.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Their mean, exactly; 0 if there are none.
    pub fn mean(&self) -> f64 {
        if self.count() == 0 { 0.0 } else { self.sum as f64 / self.count() as f64 }
    }

    /// The smallest value that a part of all values, between 0 and 1, does not exceed; 0 if there are none.
    pub fn quantile(&self, part: f64) -> u64 {
        if self.count() == 0 { 0 } else { self.histogram.value_at_quantile(part).clamp(self.min, self.max) }
    }

    /// Each value, or bucket of values (by its largest), with how often it was recorded, ascending.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.histogram.iter_recorded().map(|bucket| (bucket.value_iterated_to(), bucket.count_at_value()))
    }

    /// The figures for a table.
    pub fn summary(&self) -> Summary {
        if self.count() == 0 {
            return Summary::default();
        }
        Summary {
            count: self.count(),
            mean: self.mean(),
            min: self.min,
            p50: self.quantile(0.5),
            p90: self.quantile(0.9),
            p99: self.quantile(0.99),
            p999: self.quantile(0.999),
            max: self.max,
        }
    }
}

impl Default for Distribution {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, mean, p50, p90, p99, p999, max, .. } = self;
        write!(f, "mean {mean:.1}, p50 {p50}, p90 {p90}, p99 {p99}, p99.9 {p999}, max {max} ({count} values)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_exported_and_imported_is_what_is_merged() {
        let (mut a, mut b) = (Distribution::new(), Distribution::new());
        for n in 0..5000u64 {
            a.record(n * n);
            b.record(n * 7 + 3);
        }
        let mut merged = a.clone();
        merged.merge(&b);
        a.import(&b.export());
        assert_eq!(a.summary(), merged.summary());
        a.import(&Distribution::new().export());
        assert_eq!(a.summary(), merged.summary(), "nothing adds nothing");
    }

    #[test]
    fn figures_are_those_of_the_values() {
        let mut distribution = Distribution::new();
        (1..=1000).for_each(|value| distribution.record(value));
        let summary = distribution.summary();
        let expected =
            Summary { count: 1000, mean: 500.5, min: 1, p50: 500, p90: 900, p99: 990, p999: 999, max: 1000 };
        assert_eq!(summary, expected);
    }

    /// A bucket at 10^9 is 2^19 wide: the histogram's own maximum would be that of the bucket.
    #[test]
    fn mean_and_maximum_are_exact_where_buckets_are_wide() {
        let mut distribution = Distribution::new();
        distribution.record_many(1_000_000_007, 3);
        distribution.record(7);
        let summary = distribution.summary();
        assert_eq!(summary.max, 1_000_000_007);
        assert_eq!(summary.p50, 1_000_000_007);
        assert_eq!(summary.min, 7);
        assert!((summary.mean - (3.0 * 1_000_000_007.0 + 7.0) / 4.0).abs() < 1e-6);
    }

    #[test]
    fn merging_is_recording_both() {
        let (mut left, mut right, mut both) = (Distribution::new(), Distribution::new(), Distribution::new());
        for value in 0..2000 {
            // The right one has larger values by far, so the left one must grow.
            left.record(value);
            right.record(value * 1_000_003);
            both.record(value);
            both.record(value * 1_000_003);
        }
        left.merge(&right);
        assert_eq!(left.summary(), both.summary());
        assert!(left.buckets().eq(both.buckets()));
    }

    #[test]
    fn nothing_is_zero_and_extremes_are_recorded() {
        let mut distribution = Distribution::new();
        assert_eq!(distribution.summary(), Summary::default());
        assert_eq!(distribution.quantile(0.5), 0);
        distribution.record(0);
        distribution.record(u64::MAX);
        assert_eq!((distribution.summary().min, distribution.summary().max), (0, u64::MAX));
        distribution.clear();
        assert_eq!(distribution.summary(), Summary::default());
    }
}
