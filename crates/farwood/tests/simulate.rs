//! `farwood simulate` as its user runs it: output, exit codes, replay, refusals.

use std::process::{Command, Output};

fn simulate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_farwood"))
        .arg("simulate")
        .args(arguments)
        .output()
        .expect("the binary runs")
}

fn text(output: &Output) -> (String, String) {
    let utf8 = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (utf8(&output.stdout), utf8(&output.stderr))
}

#[test]
fn clean_trials_succeed_and_say_what_was_checked() {
    for subject in ["cells", "records", "sherman", "sphinx", "art"] {
        let output = simulate(&["--subject", subject, "--trials", "10"]);
        let (stdout, stderr) = text(&output);
        assert!(output.status.success(), "{stdout}{stderr}");
        assert!(stdout.contains("10  trials, all clean") && stdout.contains("lost cas"), "{stdout}");
    }
}

#[test]
fn one_trial_replays_to_the_same_hash() {
    let run = || {
        let output = simulate(&["--subject", "records", "--trial", "seed=5 ops=10 kill:c1@v40"]);
        let (stdout, _) = text(&output);
        let hash = stdout.lines().find(|line| line.contains("trace hash")).map(str::to_owned);
        hash.unwrap_or_else(|| panic!("no trace hash in {stdout}"))
    };
    assert_eq!(run(), run());
}

#[test]
fn a_mistake_is_caught_shrunk_and_replays_from_what_is_printed() {
    let mistake = ["--subject", "records", "--mistake", "trust-hint"];
    let output = simulate(&mistake);
    let (stdout, _) = text(&output);
    assert_eq!(output.status.code(), Some(1), "{stdout}");
    let trial =
        stdout.split("--trial '").nth(1).and_then(|rest| rest.split('\'').next()).expect("a trial to replay");
    let again = simulate(&[&mistake[..], &["--trial", trial, "--shrink", "0"]].concat());
    assert_eq!(again.status.code(), Some(1), "{trial} does not fail again");
    let without = simulate(&["--subject", "records", "--trial", trial]);
    assert!(without.status.success(), "{trial} fails without the mistake");
}

#[test]
fn nonsense_is_refused_in_one_clear_line() {
    for (arguments, expected) in [
        (&["--trial", "seed=1 colour=blue"][..], "'colour=blue' is not understood"),
        (&["--mistake", "trust-hint"], "add --subject records"),
        (&["--trials", "0"], "0"),
        (&["--subject", "oak"], "oak"),
    ] {
        let output = simulate(arguments);
        let (stdout, stderr) = text(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stdout}{stderr}");
        assert!(stderr.contains(expected) && stdout.is_empty(), "{arguments:?}: {stderr}");
    }
}
