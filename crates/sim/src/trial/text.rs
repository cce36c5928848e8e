//! A trial as one line of text, which replays exactly.

use super::Trial;
use crate::spelling::Spelling;
use std::fmt;
use std::str::FromStr;

impl fmt::Display for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, servers, sessions, tasks, ops, keys, tear, .. } = self;
        let Self {
            spelling, long_ns, immediate, churn, bulk, cancel, chunks, leaves, others, faults, ..
        } = self;
        write!(
            f,
            "seed={seed} servers={servers} sessions={sessions} tasks={tasks} ops={ops} keys={keys} tear={tear}"
        )?;
        if *spelling != Spelling::Numbers {
            write!(f, " spell={spelling}")?;
        }
        if *long_ns > 0 {
            write!(f, " long={long_ns}")?;
        }
        if *immediate {
            f.write_str(" immediate=true")?;
        }
        if *churn {
            f.write_str(" churn=true")?;
        }
        if *bulk {
            f.write_str(" bulk=true")?;
        }
        if *cancel > 0 {
            write!(f, " cancel={cancel}")?;
        }
        if let Some(chunks) = chunks {
            write!(f, " chunks={chunks}")?;
        }
        if *leaves > 0 {
            write!(f, " leaves={leaves}")?;
        }
        if *others {
            f.write_str(" others=true")?;
        }
        if faults.faults.is_empty() { Ok(()) } else { write!(f, " {faults}") }
    }
}

/// A line that is no trial.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadTrial {
    /// The word that is not understood.
    pub word: String,
}

impl fmt::Display for BadTrial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "'{}' is not understood; a trial is written like 'seed=7 servers=3 sessions=4 tasks=4 ops=40 keys=8 tear=true \
             kill:c2@v57', with at least one server, session, task, operation and key",
            self.word
        )
    }
}

impl std::error::Error for BadTrial {}

impl FromStr for Trial {
    type Err = BadTrial;

    fn from_str(text: &str) -> Result<Self, BadTrial> {
        let mut trial = Trial::default();
        for word in text.split_whitespace() {
            set(&mut trial, word).ok_or_else(|| BadTrial { word: word.to_owned() })?;
        }
        Ok(trial)
    }
}

fn set(trial: &mut Trial, word: &str) -> Option<()> {
    let Some((name, value)) = word.split_once('=') else {
        trial.faults.faults.push(word.parse().ok()?);
        return Some(());
    };
    match name {
        "seed" => trial.seed = value.parse().ok()?,
        "servers" => trial.servers = value.parse().ok().filter(|n| (1..=64).contains(n))?,
        "sessions" => trial.sessions = value.parse().ok().filter(|n| (1..=64).contains(n))?,
        "tasks" => trial.tasks = value.parse().ok().filter(|n| (1..=16).contains(n))?,
        "ops" => trial.ops = value.parse().ok().filter(|n| *n > 0)?,
        "keys" => trial.keys = value.parse().ok().filter(|n| (1..=4096).contains(n))?,
        "spell" => trial.spelling = value.parse().ok()?,
        "tear" => trial.tear = value.parse().ok()?,
        "long" => trial.long_ns = value.parse().ok()?,
        "immediate" => trial.immediate = value.parse().ok()?,
        "churn" => trial.churn = value.parse().ok()?,
        "bulk" => trial.bulk = value.parse().ok()?,
        "cancel" => trial.cancel = value.parse().ok().filter(|n| *n <= 100)?,
        "chunks" => trial.chunks = Some(value.parse().ok().filter(|n| *n > 0)?),
        "others" => trial.others = value.parse().ok()?,
        "leaves" => trial.leaves = value.parse().ok().filter(|n| *n <= 16)?,
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_survives_its_text() {
        for seed in 0..200 {
            let spelling = Spelling::ALL[usize::try_from(seed).unwrap_or(0) % Spelling::ALL.len()];
            let cancel = u8::try_from(seed % 3).unwrap_or(0);
            let chunks = (seed % 5 == 0).then_some(9);
            let (leaves, others) = (u32::from(seed % 7 == 0), seed % 11 == 0);
            let trial = Trial { seed, spelling, churn: seed % 2 == 1, cancel, ..Trial::default() };
            let trial = Trial { chunks, leaves, others, ..trial };
            let trial = trial.with_random_faults();
            assert_eq!(trial.to_string().parse::<Trial>(), Ok(trial));
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_word() {
        for (text, word) in [
            ("seed=x", "seed=x"),
            ("seed=1 kill", "kill"),
            ("servers=0", "servers=0"),
            ("tasks=17", "tasks=17"),
            ("cancel=101", "cancel=101"),
            ("chunks=0", "chunks=0"),
            ("colour=blue", "colour=blue"),
        ] {
            assert_eq!(text.parse::<Trial>(), Err(BadTrial { word: word.to_owned() }));
        }
    }
}
