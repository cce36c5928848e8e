//! How well counts fit their expectation, and Zipf's law in closed form.

/// How many standard deviations the chi-square statistic lies from its mean (Wilson and Hilferty's approximation): beyond
/// +4 the counts do not follow the expectation, below -4 they follow it more closely than chance would.
pub(crate) fn chi_square_deviation(counts: &[u64], parts: &[f64]) -> f64 {
    assert_eq!(counts.len(), parts.len());
    let total = counts.iter().sum::<u64>() as f64;
    let whole: f64 = parts.iter().sum();
    assert!((whole - 1.0).abs() < 1e-6, "expected parts add up to {whole}");
    assert!(parts.iter().all(|part| part * total >= 20.0), "too few draws for so many bins");
    let statistic: f64 = counts
        .iter()
        .zip(parts)
        .map(|(count, part)| (*count as f64 - part * total).powi(2) / (part * total))
        .sum();
    let freedom = (counts.len() - 1) as f64;
    let spread = 2.0 / (9.0 * freedom);
    ((statistic / freedom).cbrt() - (1.0 - spread)) / spread.sqrt()
}

/// Fails unless the counts fit.
#[track_caller]
pub(crate) fn assert_fits(what: &str, counts: &[u64], parts: &[f64]) {
    let deviation = chi_square_deviation(counts, parts);
    println!("{what}: {} bins, chi-square {deviation:+.2} standard deviations from its mean", counts.len());
    assert!(deviation.abs() < 4.0, "{what}: chi-square is {deviation:+.1} standard deviations off");
}

/// The sum of k^-theta for k in 1..=n: exact up to 10^4, then by Euler and Maclaurin, right to about 10^-12.
#[allow(dead_code, reason = "not all tests that share this file use it")]
pub(crate) fn harmonic(n: u64, theta: f64) -> f64 {
    let exact = n.min(10_000);
    let head: f64 = (1..=exact).rev().map(|k| (k as f64).powf(-theta)).sum();
    if n == exact {
        return head;
    }
    let (low, high) = (exact as f64, n as f64);
    let integral = if (theta - 1.0).abs() < 1e-12 {
        (high / low).ln()
    } else {
        (high.powf(1.0 - theta) - low.powf(1.0 - theta)) / (1.0 - theta)
    };
    head + integral + (high.powf(-theta) - low.powf(-theta)) / 2.0
        - theta * (high.powf(-theta - 1.0) - low.powf(-theta - 1.0)) / 12.0
}
