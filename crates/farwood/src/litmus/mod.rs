//! `farwood litmus`: what a transport really does about atomicity and order, with counts, beside what it and the contract
//! promise. A promise that is violated is an error; what is not promised is only reported.
//!
//! | file | what it is |
//! |---|---|
//! | `judge` | what observations mean; verdicts (pure) |
//! | `scenes` | one writer, readers: words, lines, order, checksummed objects |
//! | `contests` | all alike: two-word tests, atomics |
//! | `result` | the lines, as a table and as JSON |

mod contests;
mod judge;
mod result;
mod scenes;

use crate::arena::Arena;
use crate::fleet::{Fleet, MAX_CLIENTS, Transport, TransportArguments, World};
use crate::report::{JsonFile, Wall};
use crate::units::{Size, check_seconds, index, list, nanos};
use contests::{Contest, compete};
use farwood_fabric::clock::RealClock;
use judge::Promise;
use result::{Line, Litmus, Settings};
use scenes::{Bounds, Publish, Scene, Seen, race};
use std::path::PathBuf;
use std::process::ExitCode;

/// How long each test lasts if nothing is said, and how many observations each reader makes in a simulated world.
const DEFAULT_SECONDS: f64 = 0.2;
const DEFAULT_VIRTUAL_ROUNDS: u64 = 2_000;
const MAX_BLOCK_BYTES: u64 = 1 << 20;
/// Sizes of objects that carry a checksum.
const SEALED_BYTES: [usize; 3] = [256, 1024, 4096];

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    place: TransportArguments,

    /// Clients: one writes, the others read; each with a session, an endpoint and a thread of its own
    #[arg(long, default_value_t = 2)]
    clients: u32,

    /// Bytes of the blocks that are read and written at once, with commas: multiples of 64
    #[arg(long, default_value = "256,1KiB,4KiB,16KiB,64KiB", value_name = "SIZES")]
    sizes: String,

    /// Time for each test [default: 0.2 on a real transport]
    #[arg(long)]
    seconds: Option<f64>,

    /// Observations of each reader in each test [default: 2000 in a simulated world]
    #[arg(long)]
    rounds: Option<u64>,

    /// Everything random in a simulated world comes from it
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Write all counts and settings to this file, too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The arguments, checked.
struct Plan {
    transport: Transport,
    clients: u32,
    sizes: Vec<usize>,
}

impl Plan {
    fn new(arguments: &Arguments) -> Result<Self, String> {
        let transport = arguments.place.parse(World::ADVERSARY)?;
        if !(2..=MAX_CLIENTS).contains(&arguments.clients) {
            return Err(format!("--clients: a race needs 2 to {MAX_CLIENTS}"));
        }
        let size = |text: &str| match text.parse()? {
            Size(bytes) if bytes % 64 == 0 && bytes <= MAX_BLOCK_BYTES => Ok(index(bytes)),
            size => Err(format!("{size} is no multiple of 64 bytes of at most {}", Size(MAX_BLOCK_BYTES))),
        };
        let sizes = list("--sizes", &arguments.sizes, size)?;
        check_seconds(arguments.seconds)?;
        if arguments.rounds == Some(0) {
            return Err("--rounds: a test needs at least 1".to_owned());
        }
        Ok(Self { transport, clients: arguments.clients, sizes })
    }

    fn bounds(arguments: &Arguments, is_virtual: bool) -> Bounds {
        let (rounds, seconds) = match (arguments.rounds, arguments.seconds) {
            (None, None) if is_virtual => (Some(DEFAULT_VIRTUAL_ROUNDS), None),
            (None, None) => (None, Some(DEFAULT_SECONDS)),
            given => given,
        };
        Bounds { rounds: rounds.unwrap_or(u64::MAX), span_ns: seconds.map_or(u64::MAX, nanos) }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let plan = Plan::new(arguments)?;
    let json = JsonFile::open(arguments.json.as_deref())?;
    let clock = RealClock::new();
    let largest = plan.sizes.iter().copied().chain(SEALED_BYTES).max().unwrap_or(0);
    let on_one_server = scenes::arena_bytes(largest);
    let fleet = Fleet::open(&plan.transport, on_one_server, 0, arguments.seed)?;
    let bounds = Plan::bounds(arguments, fleet.is_virtual());
    // The arena is spread evenly, and everything happens on one server.
    let servers = fleet.cluster().view().servers.len() as u64;
    let lines = Arena::with(&fleet, "litmus", on_one_server * servers, |arena| {
        Bench { fleet: &fleet, arena, clients: plan.clients, bounds }.test_all(&plan.sizes)
    })?;
    let settings = Settings {
        transport: arguments.place.transport.clone(),
        servers,
        clients: plan.clients,
        sizes_bytes: plan.sizes,
        seconds_per_test: arguments.seconds,
        rounds_per_reader: arguments.rounds,
        seed: arguments.seed,
    };
    let wall = Wall { seconds: clock.now() as f64 / 1e9 };
    let litmus = Litmus::new(&fleet, settings, lines, wall);
    litmus.print()?;
    json.map_or(Ok(()), |file| file.write(&litmus))?;
    Ok(if litmus.is_broken() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Where tests run.
struct Bench<'a> {
    fleet: &'a Fleet,
    arena: &'a Arena,
    clients: u32,
    bounds: Bounds,
}

impl Bench<'_> {
    fn race(&self, scene: Scene) -> Result<Seen, String> {
        race(self.fleet, self.arena, self.clients, self.bounds, scene)
    }

    fn compete(&self, contest: Contest) -> Result<judge::Count, String> {
        compete(self.fleet, self.arena, self.clients, self.bounds, contest)
    }

    fn test_all(&self, sizes: &[usize]) -> Result<Vec<Line>, String> {
        let mut lines = self.words_and_lines(sizes)?;
        lines.extend(self.order_of_lines(sizes)?);
        lines.extend(self.order_of_batches()?);
        lines.extend(self.atomics()?);
        for bytes in SEALED_BYTES {
            let seen = self.race(Scene::Sealed { bytes })?;
            let line = Line::new("checksummed object", Promise::Claimed("checksum"), seen.count).of(bytes);
            lines.push(line.with_torn(seen.torn));
        }
        Ok(lines)
    }

    fn words_and_lines(&self, sizes: &[usize]) -> Result<Vec<Line>, String> {
        let mut sum = Seen::default();
        for bytes in [64].iter().chain(sizes) {
            sum.add(self.race(Scene::Block { bytes: *bytes })?);
        }
        let claimed = self.fleet.cluster().capabilities().line_atomic;
        Ok(vec![
            Line::new("8-byte words are whole", Promise::Contract, sum.words),
            Line::new("64-byte lines are whole", Promise::by("line_atomic", claimed), sum.count),
        ])
    }

    fn order_of_lines(&self, sizes: &[usize]) -> Result<Vec<Line>, String> {
        let ordered = u64::from(self.fleet.cluster().capabilities().ordered_lines_bytes);
        let mut lines = Vec::new();
        let mut test = |property, bytes: usize, scene| {
            let promise = Promise::by("ordered_lines_bytes", bytes as u64 <= ordered);
            let seen = self.race(scene)?;
            lines.push(Line::new(property, promise, seen.count).of(bytes));
            Ok::<_, String>(())
        };
        for bytes in sizes.iter().copied() {
            test("lines of a WRITE ascend", bytes, Scene::WriteOrder { bytes })?;
        }
        for bytes in sizes.iter().copied() {
            test("lines of a READ ascend", bytes, Scene::ReadOrder { bytes })?;
        }
        Ok(lines)
    }

    fn order_of_batches(&self) -> Result<Vec<Line>, String> {
        let ordered_reads = self.fleet.cluster().capabilities().ordered_reads;
        let message = |publish, reads_in_one_batch| Scene::Message { publish, reads_in_one_batch };
        let mut lines = Vec::new();
        for (property, promise, scene) in [
            ("batch: WRITE, then WRITE", Promise::Contract, message(Publish::WriteWrite, false)),
            ("batch: WRITE, then atomic", Promise::Contract, message(Publish::WriteFaa, false)),
            ("batch: atomic, fence, WRITE", Promise::Contract, message(Publish::FaaWrite, false)),
            (
                "batch: READ, then READ",
                Promise::by("ordered_reads", ordered_reads),
                message(Publish::WriteWrite, true),
            ),
            ("two batches posted together", Promise::Nobody(None), message(Publish::TwoBatches, false)),
        ] {
            lines.push(Line::new(property, promise, self.race(scene)?.count));
        }
        for (property, contest) in [
            ("batch: WRITE, then READ", Contest::WriteRead),
            ("batch: atomic, then READ", Contest::FaaRead),
            ("batch: READ, fence, WRITE", Contest::ReadWrite),
        ] {
            lines.push(Line::new(property, Promise::Contract, self.compete(contest)?));
        }
        Ok(lines)
    }

    fn atomics(&self) -> Result<Vec<Line>, String> {
        let masked = self.fleet.cluster().capabilities().masked_cas;
        let mut lines = Vec::new();
        for (property, contest) in [
            ("FAA is atomic", Contest::Faa),
            ("CAS is atomic", Contest::Cas),
            ("masked CAS is atomic", Contest::MaskedCas),
        ] {
            if contest != Contest::MaskedCas || masked {
                lines.push(Line::new(property, Promise::Contract, self.compete(contest)?));
            }
        }
        Ok(lines)
    }
}
