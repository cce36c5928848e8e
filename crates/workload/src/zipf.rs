//! Zipf's law over ranks `1..=count` for any exponent `theta` of 0 or more: rank k is drawn with a probability in
//! proportion to k^-theta.
//!
//! Rejection-inversion (Hörmann and Derflinger, "Rejection-inversion to generate variates from monotone discrete
//! distributions", ACM TOMACS 1996). It is exact, needs no table and no sum over the ranks, takes constant time for 10^9
//! ranks and more, and does not care whether theta is below, at or above 1. The generator of YCSB (Gray et al., SIGMOD 1994)
//! is an approximation beyond the second rank, sums over all ranks before the first draw, and cannot do theta = 1.
//!
//! With h(x) = x^-theta and its integral H, both continued to real x:
//! 1. draw u evenly between H(1.5) - h(1) and H(count + 0.5): the area under the histogram, its first bar exact;
//! 2. x = H^-1(u), k = x rounded: a candidate;
//! 3. accept it if k - x is within a bound that holds for all k, or if u falls into the part of the bar that h(k) covers;
//!    else start again, which is rare.

use crate::random::Random;

/// Ranks, and keys, are counted in `f64` without loss.
pub const MAX_COUNT: u64 = 1 << 53;
/// Beyond this exponent all draws are rank 1; no text means that.
pub const MAX_THETA: f64 = 10.0;

/// Draws ranks by Zipf's law.
#[derive(Clone, Debug)]
pub struct Zipf {
    theta: f64,
    count: u64,
    /// H(1.5) - h(1).
    area_low: f64,
    /// H(count + 0.5).
    area_high: f64,
    /// Candidates at most this much above x are accepted unseen.
    sure: f64,
}

impl Zipf {
    /// The law over `1..=count`; `None` if theta is not in `0..=MAX_THETA` or the count not in `1..=MAX_COUNT`.
    pub fn new(theta: f64, count: u64) -> Option<Self> {
        let fits = (0.0..=MAX_THETA).contains(&theta) && (1..=MAX_COUNT).contains(&count);
        fits.then(|| {
            let area_low = area(theta, 1.5) - 1.0;
            let sure = 2.0 - inverse_area(theta, area(theta, 2.5) - height(theta, 2.0));
            Self { theta, count, area_low, area_high: area(theta, count as f64 + 0.5), sure }
        })
    }

    /// Over how many ranks.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The same law over another number of ranks: one logarithm and one exponential.
    pub fn set_count(&mut self, count: u64) {
        debug_assert!((1..=MAX_COUNT).contains(&count), "{count} ranks");
        self.count = count;
        self.area_high = area(self.theta, count as f64 + 0.5);
    }

    /// A rank in `1..=count`.
    #[inline]
    pub fn draw(&self, random: &mut Random) -> u64 {
        loop {
            let u = self.area_high + random.unit() * (self.area_low - self.area_high);
            let x = inverse_area(self.theta, u);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "x lies between 0.5 and 2^53 + 0.5, but for rounding, which the clamp mends"
            )]
            let k = ((x + 0.5) as u64).clamp(1, self.count);
            let rank = k as f64;
            if rank - x <= self.sure || u >= area(self.theta, rank + 0.5) - height(self.theta, rank) {
                return k;
            }
        }
    }
}

/// h(x) = x^-theta.
fn height(theta: f64, x: f64) -> f64 {
    (-theta * x.ln()).exp()
}

/// H(x), the integral of h from 1 to x: (x^(1 - theta) - 1) / (1 - theta), whose limit at theta = 1 is ln x.
fn area(theta: f64, x: f64) -> f64 {
    let log = x.ln();
    let exponent = (1.0 - theta) * log;
    // exp(e) - 1 over e is 1 + e/2 near 0.
    let slope = if exponent.abs() < 1e-8 { 1.0 + exponent / 2.0 } else { exponent.exp_m1() / exponent };
    slope * log
}

/// The x with H(x) = `area`.
fn inverse_area(theta: f64, area: f64) -> f64 {
    // Not below -1, where rounding may push it: the logarithm ends there.
    let t = ((1.0 - theta) * area).max(-1.0);
    // ln(1 + t) over t is 1 - t/2 near 0.
    let slope = if t.abs() < 1e-8 { 1.0 - t / 2.0 } else { t.ln_1p() / t };
    (slope * area).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn area_and_inverse_agree_on_both_sides_of_one() {
        for theta in [0.0, 0.5, 0.99, 1.0 - 1e-12, 1.0, 1.0 + 1e-12, 1.2, 2.0] {
            for x in [1.0, 1.5, 2.5, 1e3, 1e6] {
                let back = inverse_area(theta, area(theta, x));
                assert!((back / x - 1.0).abs() < 1e-6, "theta {theta}: {x} came back as {back}");
            }
        }
    }

    #[test]
    fn one_rank_is_always_drawn() {
        let zipf = Zipf::new(0.99, 1).unwrap();
        let mut random = Random::new(1, 0);
        assert!((0..1000).all(|_| zipf.draw(&mut random) == 1));
    }

    #[test]
    fn what_is_no_law_is_refused() {
        for (theta, count) in [(-0.1, 5), (f64::NAN, 5), (f64::INFINITY, 5), (0.99, 0), (0.99, u64::MAX)] {
            assert!(Zipf::new(theta, count).is_none(), "theta {theta}, count {count}");
        }
    }

    #[test]
    fn a_law_with_a_changed_count_is_the_law_of_that_count() {
        let mut grown = Zipf::new(0.8, 10).unwrap();
        grown.set_count(1000);
        let made = Zipf::new(0.8, 1000).unwrap();
        let (mut left, mut right) = (Random::new(3, 0), Random::new(3, 0));
        assert!((0..1000).all(|_| grown.draw(&mut left) == made.draw(&mut right)));
    }
}
