//! How a file says that it was left, and who is believed.

use super::header::{ENCODED_BYTES, Header, State};
use super::*;
use crate::addr::RegionId;
use crate::region::{Permissions, RegionSpec};
use crate::transport::host::gates::Gates;
use crate::transport::serve::Backing;
use crate::transport::serve::backing::{self, Share};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("farwood-kept-{}-{name}", std::process::id())))
    }

    fn open_with(&self, keep: &KeepOptions) -> Result<Open, ServeError> {
        let sizes = [(RegionId::MAIN, 300 << 10), (RegionId::LOCK, 4096), (RegionId::META, 5000)];
        let specs = sizes.map(|(id, bytes)| RegionSpec { id, bytes, permissions: Permissions::ALL });
        let (regions, gates, mut share) = backing::open(&Backing::Path(self.0.clone()), keep, &specs)?;
        let keeper = share.keeper.take().expect("a file is kept");
        Ok(Open { regions, keeper, _rest: (gates, share) })
    }

    fn open(&self, boot: u128) -> Result<Open, ServeError> {
        self.open_with(&KeepOptions { boot: Some(BootId(boot)), ..KeepOptions::default() })
    }

    fn refusal(&self, boot: u128) -> NotWhole {
        why(self.open(boot))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

struct Open {
    regions: Regions,
    keeper: Keeper,
    _rest: (Gates, Share),
}

impl Open {
    fn set(&self, value: u64) {
        self.regions.region(RegionId::MAIN).word(70 << 10).store(value, Ordering::SeqCst);
    }

    fn close(mut self) {
        self.keeper.close(&self.regions).expect("there is room");
    }
}

fn why(refused: Result<Open, ServeError>) -> NotWhole {
    match refused.err() {
        Some(ServeError::NotWhole { why, .. }) => why,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn what_was_closed_is_taken_and_what_was_not_only_while_the_machine_is_up() {
    let place = Place::new("closed");
    place.open(1).expect("it is new").set(7);
    assert_eq!(place.refusal(2), NotWhole::InUse);
    place.open(1).expect("the same boot").close();
    assert_eq!(left(&place.0), Some(Left { opening: 2, is_closed: true }));
    let open = place.open(2).expect("it was closed");
    assert_eq!(open.regions.region(RegionId::MAIN).word(70 << 10).load(Ordering::SeqCst), 7);
    assert!(!open.regions.is_of_same_boot());
    assert_eq!(
        left(&place.0),
        Some(Left { opening: 3, is_closed: false }),
        "before anybody has changed anything"
    );
}

#[test]
fn a_process_that_ends_while_it_closes_has_not_closed() {
    let place = Place::new("killed");
    let open = place.open(1).expect("it is new");
    // So far it had come: the checksums are there.
    let sums: Vec<u8> = open.keeper.sums(&open.regions).flat_map(|(_, sum)| sum.to_le_bytes()).collect();
    open.keeper.put(SUMS_AT, &sums).expect("there is room");
    drop(open);
    assert_eq!(place.refusal(2), NotWhole::InUse);
    // And here the new header was there, and the old one still was, too.
    let open = place.open(1).expect("the same boot");
    let (old, at) = (open.keeper.header, slot_at(open.keeper.current));
    open.close();
    let file = File::options().write(true).open(&place.0).expect("the file");
    file.write_all_at(&old.encode(), at as u64).expect("written");
    place.open(2).expect("it was closed").close();
}

#[test]
fn what_cannot_be_written_is_an_error_and_not_closed() {
    let place = Place::new("full");
    let mut open = place.open(1).expect("it is new");
    open.keeper.file = Arc::new(File::open(&place.0).expect("the file"));
    assert!(matches!(open.keeper.close(&open.regions), Err(ServeError::Memory { .. })));
    drop(open);
    assert_eq!(left(&place.0).map(|left| left.is_closed), Some(false));
}

#[test]
fn a_server_that_does_not_start_leaves_closed_memory_closed() {
    let place = Place::new("put-back");
    place.open(1).expect("it is new").close();
    let mut open = place.open(2).expect("it was closed");
    open.keeper.put_back(&open.regions);
    drop(open);
    let mut open = place.open(3).expect("it is closed still");
    open.set(1);
    open.keeper.put_back(&open.regions);
    drop(open);
    assert_eq!(place.refusal(4), NotWhole::InUse, "it has been changed");
}

#[test]
fn a_copy_made_while_it_was_used_is_noticed_even_under_the_same_boot() {
    let place = Place::new("original");
    let copy = Place::new("copy");
    let open = place.open(1).expect("it is new");
    std::fs::copy(&place.0, &copy.0).expect("a copy");
    assert_eq!(copy.refusal(1), NotWhole::Copied);
    open.close();
    std::fs::copy(&place.0, &copy.0).expect("a copy");
    copy.open(1).expect("a copy of what is closed is as good").close();
}

#[test]
fn what_a_pool_knows_of_its_openings_counts() {
    let place = Place::new("older");
    let keep = |opening, number, was_closed| KeepOptions {
        boot: Some(BootId(1)),
        opening: Some(opening),
        last: Some(LastOpening { number, was_closed }),
        ..KeepOptions::default()
    };
    assert_eq!(why(place.open_with(&keep(6, 5, true))), NotWhole::Older { found: 0, expected: 5 });
    place.open_with(&keep(1, 0, false)).expect("it is new").close();
    place.open_with(&keep(2, 1, true)).expect("the last one").close();
    assert_eq!(why(place.open_with(&keep(4, 3, true))), NotWhole::Older { found: 2, expected: 3 });
    drop(place.open_with(&keep(3, 2, true)).expect("the last one"));
    assert_eq!(left(&place.0), Some(Left { opening: 3, is_closed: false }));
    // Started again within the same opening of the pool.
    drop(place.open_with(&keep(3, 2, true)).expect("the same opening"));
    assert_eq!(why(place.open_with(&keep(4, 3, true))), NotWhole::Copied, "the pool has closed it");
    place.open_with(&keep(4, 3, false)).expect("the pool has not closed it").close();
}

#[test]
fn data_without_a_header_is_not_formatted() {
    let place = Place::new("headless");
    place.open(1).expect("it is new").close();
    let file = File::options().write(true).open(&place.0).expect("the file");
    file.write_all_at(&[0; 2 * SLOT_BYTES], HEADER_AT as u64).expect("written");
    place.open(1).expect("nothing but zeroes is as good as new").set(9);
    file.write_all_at(&[0; 2 * SLOT_BYTES], HEADER_AT as u64).expect("written");
    assert_eq!(place.refusal(1), NotWhole::NoHeader);
}

#[test]
fn torn_pieces_are_named_when_they_are_accepted() {
    let place = Place::new("torn");
    let open = place.open(1).expect("it is new");
    open.set(5);
    open.close();
    let whole = std::fs::read(&place.0).expect("the file");
    let slot = |n: usize| whole[slot_at(n)..][..ENCODED_BYTES].try_into().ok().and_then(Header::decode);
    let (_, header) = Header::choose([slot(0), slot(1)]).expect("a header");
    assert_eq!((header.state, header.pieces), (State::Clean, 5 + 1 + 1));
    let file = File::options().write(true).open(&place.0).expect("the file");
    let at = whole.len() - (304 << 10) + (70 << 10);
    file.write_all_at(&6u64.to_le_bytes(), at as u64).expect("written");
    let failed = NotWhole::Pieces { failed: 1, pieces: 7, region: RegionId::MAIN, offset: 64 << 10 };
    assert_eq!(place.refusal(1), failed);
    let keep = KeepOptions { boot: Some(BootId(1)), accept_torn: true, ..KeepOptions::default() };
    let open = place.open_with(&keep).expect("accepted");
    let piece = Piece { region: RegionId::MAIN, offset: 64 << 10, bytes: 64 << 10 };
    assert_eq!(open.regions.found, Found::Torn(Damage { pieces: 7, failed: vec![piece] }));
    drop(open);
    assert_eq!(place.refusal(1), NotWhole::InUse, "nobody has put it right");
    let mut open = place.open_with(&keep).expect("accepted");
    open.keeper.started().expect("there is room");
    drop(open);
    place.open(1).expect("it was put right").close();
}
