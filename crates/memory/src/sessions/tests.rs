//! Leases, fencing and adoption, one rule at a time.

use super::*;
use crate::testing::VecMemory;
use farwood_fabric::addr::ServerId;

const START: Progress = Progress { oldest_pin: 1, flushed: 0 };

fn s(id: u16) -> SessionId {
    SessionId::new(id)
}

fn world(server: u16) -> (VecMemory, ServerConfig, SessionTable) {
    let config = ServerConfig::tiny(ServerId::new(server), 2, 1);
    let memory = VecMemory::new(&layout::regions(&config));
    layout::format(&memory, &config);
    let table = SessionTable::load(&memory, &config, 0).unwrap().0;
    (memory, config, table)
}

#[test]
fn numbers_are_reused_as_late_as_possible() {
    let (memory, config, mut table) = world(0);
    assert_eq!(table.open(&memory, Kind::default(), START, 0), Ok(s(1)));
    table.release(&memory, s(1));
    assert_eq!(table.open(&memory, Kind::default(), START, 0), Ok(s(2)));
    let mut table = SessionTable::load(&memory, &config, 0).unwrap().0;
    assert_eq!(table.open(&memory, Kind::default(), START, 0), Ok(s(3)), "a restart does not begin anew");
    assert_eq!(table.open(&memory, Kind::default(), START, 0), Ok(s(4)));
    assert_eq!(table.open(&memory, Kind::default(), START, 0), Ok(s(1)));
    let full = ControlError::SessionsFull { max: 4, dead: 0 };
    assert_eq!(
        table.open(&memory, Kind::default(), START, 0),
        Err(full),
        "one of before the restart lives on"
    );
    table.release(&memory, s(3));
    assert_eq!(table.open(&memory, Kind::default(), START, 0), Ok(s(3)));
}

#[test]
fn a_lease_protects_until_it_runs_out_and_a_heartbeat_renews_it() {
    let (memory, _, mut table) = world(0);
    let a = table.open(&memory, Kind::default(), START, 100).unwrap();
    assert_eq!(
        table.begin_fence(&memory, a, false, 1099),
        Err(ControlError::LeaseAlive { session: a, left_ns: 1 })
    );
    table.renew(&memory, a, 1500);
    assert!(table.begin_fence(&memory, a, false, 2499).is_err());
    assert_eq!(table.begin_fence(&memory, a, false, 2500), Ok(1));
    assert_eq!(table.state(a), State::Fencing);
    assert_eq!(table.check_active(a, table.term(a)), Err(ControlError::SessionFenced { session: a }));
}

#[test]
fn a_session_whose_process_is_gone_can_be_fenced_at_once() {
    let (memory, _, mut table) = world(0);
    let a = table.open(&memory, Kind::default(), START, 100).unwrap();
    table.abandon(&memory, a, table.term(a) + 1);
    assert!(table.begin_fence(&memory, a, false, 101).is_err(), "that was another holder of the number");
    table.abandon(&memory, a, table.term(a));
    assert_eq!(table.check_active(a, table.term(a)), Err(ControlError::SessionFenced { session: a }));
    assert_eq!(table.state(a), State::Active, "what it had stays until it is fenced");
    assert_eq!(table.begin_fence(&memory, a, false, 101), Ok(1));
}

#[test]
fn sessions_without_lease_yield_to_force_only() {
    let (memory, config, _) = world(0);
    let config = ServerConfig { lease_ns: 0, ..config };
    let mut table = SessionTable::load(&memory, &config, 0).unwrap().0;
    let a = table.open(&memory, Kind::default(), START, 0).unwrap();
    assert!(table.begin_fence(&memory, a, false, Nanos::MAX).is_err());
    assert_eq!(table.begin_fence(&memory, a, true, 0), Ok(1));
}

#[test]
fn terms_grow_whatever_becomes_of_numbers() {
    let (memory, config, mut table) = world(0);
    let mut last = 0;
    for round in 0..20 {
        let session = table.open(&memory, Kind::default(), START, 0).unwrap();
        assert_eq!(table.term(session), last + 1);
        last = table.term(session);
        table.release(&memory, session);
        assert_eq!(table.term(session), last, "a free slot remembers");
        if round % 3 == 0 {
            table = SessionTable::load(&memory, &config, 0).unwrap().0;
        }
    }
    let entry = Layout::new(&config).session_entry(1);
    layout::store(&memory, entry + session_entry::TERM_AT, last + 1);
    let damaged = SessionTable::load(&memory, &config, 0);
    assert!(matches!(damaged, Err(StartError::Mismatch(_))), "a term that was not handed out");
}

#[test]
fn adoption_passes_on_when_the_adopter_is_fenced() {
    let (memory, _, mut table) = world(0);
    let [a, b, c] = [0; 3].map(|_| table.open(&memory, Kind::default(), START, 0).unwrap());
    let [of_a, of_b] = [a, b].map(|session| table.term(session));
    assert_eq!(table.complete_fence(&memory, a, of_a), Err(ControlError::NotFenced { session: a }));
    assert_eq!(table.begin_adopt(&memory, a, b), Err(ControlError::NotFenced { session: a }));
    table.begin_fence(&memory, a, true, 0).unwrap();
    assert_eq!(table.begin_adopt(&memory, a, b), Err(ControlError::NotFenced { session: a }));
    table.complete_fence(&memory, a, of_a).unwrap();
    assert!(matches!(table.check_adopter(a, of_a, b), Err(ControlError::BadRequest { .. })));
    assert_eq!(table.begin_adopt(&memory, a, b), Ok(of_a));
    assert_eq!(table.begin_adopt(&memory, a, b), Ok(of_a));
    let taken = ControlError::BeingAdopted { session: a, by: b };
    assert_eq!(table.begin_adopt(&memory, a, c), Err(taken.clone()));
    assert_eq!(table.check_adopter(a, of_a, c), Err(taken.clone()));
    table.begin_fence(&memory, b, true, 0).unwrap();
    assert_eq!(
        table.begin_adopt(&memory, a, c),
        Err(taken),
        "until it is fenced everywhere, it may still act"
    );
    table.complete_fence(&memory, b, of_b).unwrap();
    assert_eq!(table.begin_adopt(&memory, a, c), Ok(of_a));
    assert_eq!(table.check_adopter(a, of_a, c), Ok(()));
    table.release(&memory, c);
    assert_eq!(table.state(a), State::Fenced, "an adopter that leaves gives up");
}

#[test]
fn the_coordinator_knows_no_term_but_the_current_one() {
    let (memory, _, mut table) = world(0);
    for _ in 0..4 {
        let session = table.open(&memory, Kind::default(), START, 0).unwrap();
        table.release(&memory, session);
    }
    let [a, b] = [0; 2].map(|_| table.open(&memory, Kind::default(), START, 0).unwrap());
    assert_eq!((a, table.term(a)), (s(1), 5), "the number came round");
    let unknown = ControlError::NoSuchSession { session: a };
    let check = |table: &mut SessionTable| {
        for term in [0, 1, 4, 6, u64::MAX] {
            assert_eq!(table.complete_fence(&memory, a, term), Err(unknown.clone()));
            assert_eq!(table.fence_here(&memory, a, term), Err(unknown.clone()));
            assert_eq!(table.check_adopter(a, term, b), Err(unknown.clone()));
            assert!(!table.is_past(a, term), "here it is an error");
        }
    };
    check(&mut table);
    assert_eq!(table.check_attach(a, 1), Err(ControlError::SessionFenced { session: a }));
    assert_eq!(table.check_attach(a, 5), Ok(Attach::Again));
    assert_eq!(table.check_attach(a, 6), Err(unknown.clone()));
    assert_eq!(table.begin_fence(&memory, a, true, 0), Ok(5));
    check(&mut table);
    assert_eq!(table.state(a), State::Fencing);
    assert_eq!(table.complete_fence(&memory, a, 5), Ok(()));
    assert_eq!(table.begin_adopt(&memory, a, b), Ok(5));
    check(&mut table);
    assert_eq!(table.state(a), State::Adopting { by: b });
}

/// Checks and attaches, as the server does.
fn attach(
    table: &mut SessionTable,
    memory: &VecMemory,
    session: SessionId,
    term: u64,
) -> Result<Attach, ControlError> {
    let attach = table.check_attach(session, term)?;
    table.attach(memory, session, term, false)?;
    Ok(attach)
}

#[test]
fn other_servers_fence_whom_they_never_met() {
    let (memory, config, mut table) = world(1);
    let fenced = Err(ControlError::SessionFenced { session: s(2) });
    assert_eq!(table.check_adopter(s(2), 7, s(1)), Err(ControlError::NoSuchSession { session: s(2) }));
    table.fence_here(&memory, s(2), 7).unwrap();
    table.fence_here(&memory, s(2), 7).unwrap();
    assert_eq!(attach(&mut table, &memory, s(2), 7), fenced);
    assert_eq!(table.check_adopter(s(2), 7, s(1)), Ok(()), "nothing of it is here");
    table.release(&memory, s(2));
    assert_eq!(attach(&mut table, &memory, s(2), 7), fenced, "it is over, though its slot is free");
    let mut table = SessionTable::load(&memory, &config, 0).unwrap().0;
    assert_eq!(attach(&mut table, &memory, s(2), 7), fenced, "and a restart does not change that");
    assert_eq!(attach(&mut table, &memory, s(2), 8), Ok(Attach::New));
    assert_eq!(attach(&mut table, &memory, s(2), 8), Ok(Attach::Again));
    assert_eq!(table.check_adopter(s(2), 8, s(1)), Err(ControlError::NotFenced { session: s(2) }));
    for stranger in [0, 5, 0xf000] {
        let refused = ControlError::NoSuchSession { session: s(stranger) };
        assert_eq!(attach(&mut table, &memory, s(stranger), 9), Err(refused.clone()));
        assert_eq!(table.fence_here(&memory, s(stranger), 9), Err(refused));
        assert!(!table.is_past(s(stranger), 9));
    }
    assert_eq!(table.fence_here(&memory, s(3), 0), Err(ControlError::NoSuchSession { session: s(3) }));
    assert!(attach(&mut table, &memory, s(3), 0).is_err(), "no session has term 0");
}

#[test]
fn other_servers_tell_the_holders_of_a_number_apart() {
    let (memory, _, mut table) = world(1);
    assert_eq!(attach(&mut table, &memory, s(1), 3), Ok(Attach::New));
    assert_eq!(table.check_attach(s(1), 2), Err(ControlError::SessionFenced { session: s(1) }));
    assert!(table.is_past(s(1), 2) && !table.is_past(s(1), 3) && !table.is_past(s(1), 4));
    for term in [2, 4] {
        assert_eq!(table.check_adopter(s(1), term, s(2)), Err(ControlError::NoSuchSession { session: s(1) }));
    }
    assert_eq!(table.check_attach(s(1), 5), Ok(Attach::Instead), "its predecessor is active");
    table.fence_here(&memory, s(1), 3).unwrap();
    assert_eq!(table.check_attach(s(1), 3), Err(ControlError::SessionFenced { session: s(1) }));
    assert_eq!(table.check_attach(s(1), 5), Ok(Attach::Instead), "its predecessor was not adopted");
    table.release(&memory, s(1));
    assert_eq!(attach(&mut table, &memory, s(1), 5), Ok(Attach::New));
    table.fence_here(&memory, s(1), 6).unwrap();
    assert_eq!((table.state(s(1)), table.term(s(1))), (State::Fenced, 6), "who never came is remembered");
    assert_eq!(table.check_attach(s(1), 6), Err(ControlError::SessionFenced { session: s(1) }));
}

#[test]
fn a_restart_gives_sessions_a_new_lease_and_leaves_the_rest_as_it_was() {
    let (memory, config, mut table) = world(0);
    let session = table.open(&memory, Kind { read_only: true, reaper: false }, START, 0).unwrap();
    let term = table.term(session);
    table.publish(&memory, session, Progress { oldest_pin: 7, flushed: 3 });
    let (mut table, living) = SessionTable::load(&memory, &config, 5000).unwrap();
    assert_eq!(living, [(session, Progress { oldest_pin: 7, flushed: 3 })]);
    let state = SessionState::Active;
    let listed = Listed { session, term, state, lease_left_ns: 1000, adopter: SessionId::NONE };
    assert_eq!(table.list(5000), [listed]);
    assert_eq!(table.active().collect::<Vec<_>>(), [(session, term, true)]);
    assert_eq!(table.check_active(session, term), Ok(()));
    assert_eq!(table.check_attach(session, term), Ok(Attach::Again));
    let alive = ControlError::LeaseAlive { session, left_ns: 1 };
    assert_eq!(table.begin_fence(&memory, session, false, 5999), Err(alive));
    assert_eq!(table.begin_fence(&memory, session, false, 6000), Ok(term), "it was not heard of");
    for state in [State::Fencing, State::Fenced, State::Adopting { by: s(2) }] {
        table.change(&memory, 0, state);
        let (table, _) = SessionTable::load(&memory, &config, 5000).unwrap();
        assert_eq!((table.state(session), table.active().count()), (state, 0));
    }
}

/// Whoever was late is heard of at once if it lives; whoever is gone is not waited for any longer.
#[test]
fn a_restart_gives_a_lost_session_a_moment_on_the_coordinator_and_none_elsewhere() {
    let (memory, config, mut table) = world(0);
    let config = ServerConfig { lease_ns: 10 * SILENCE_NS, ..config };
    let a = table.open(&memory, Kind::default(), START, 0).unwrap();
    let term = table.term(a);
    table.abandon(&memory, a, term);
    let (mut table, _) = SessionTable::load(&memory, &config, 100).unwrap();
    assert_eq!(table.check_active(a, term), Ok(()));
    assert!(table.begin_fence(&memory, a, false, SILENCE_NS).is_err());
    table.renew(&memory, a, 200);
    assert_eq!(table.list(200)[0].lease_left_ns, config.lease_ns, "it lives");
    table.abandon(&memory, a, term);
    let (mut table, _) = SessionTable::load(&memory, &config, 100).unwrap();
    assert_eq!(table.begin_fence(&memory, a, false, 100 + SILENCE_NS), Ok(term));
    let (memory, config, mut table) = world(1);
    table.attach(&memory, a, 7, false).unwrap();
    let (mut table, _) = SessionTable::load(&memory, &config, 100).unwrap();
    assert_eq!((table.check_active(a, 7), table.active().count()), (Ok(()), 1));
    table.abandon(&memory, a, 7);
    let (table, _) = SessionTable::load(&memory, &config, 100).unwrap();
    assert_eq!((table.check_active(a, 7).is_err(), table.active().count()), (true, 0));
}

#[test]
fn a_crash_cannot_leave_an_adopter_that_is_gone() {
    let (memory, config, mut table) = world(0);
    let a = table.open(&memory, Kind::default(), START, 0).unwrap();
    table.change(&memory, 0, State::Adopting { by: s(4) });
    let mut table = SessionTable::load(&memory, &config, 0).unwrap().0;
    table.repair(&memory);
    assert_eq!(table.state(a), State::Fenced);
    layout::store(&memory, Layout::new(&config).session_entry(2), 9);
    assert!(matches!(SessionTable::load(&memory, &config, 0), Err(StartError::Mismatch(_))));
}

const REAPER: Kind = Kind { read_only: false, reaper: true };

/// A table of 16 numbers, of which two are kept back.
fn big_world() -> (VecMemory, ServerConfig, SessionTable) {
    let config = ServerConfig { max_sessions: 16, ..ServerConfig::tiny(ServerId::new(0), 2, 1) };
    let memory = VecMemory::new(&layout::regions(&config));
    layout::format(&memory, &config);
    let table = SessionTable::load(&memory, &config, 0).unwrap().0;
    (memory, config, table)
}

/// Takes numbers until there is none to be had; who has them.
fn fill(table: &mut SessionTable, memory: &VecMemory, kind: Kind) -> Vec<SessionId> {
    (0..17).map_while(|_| table.open(memory, kind, START, 0).ok()).collect()
}

#[test]
fn dead_reapers_keep_nobody_out_in_whatever_state_they_are() {
    let (memory, config, mut table) = big_world();
    assert_eq!(fill(&mut table, &memory, Kind::default()).len(), 14);
    let reapers = fill(&mut table, &memory, REAPER);
    assert_eq!(reapers, [s(15), s(16)]);
    let full = |max, dead| Err(ControlError::SessionsFull { max, dead });
    assert_eq!(table.open(&memory, REAPER, START, 999), full(14, 0), "all live");
    // Whom somebody who lives cleans up after is left to him.
    for reaper in &reapers {
        table.change(&memory, reaper.get() - 1, State::Adopting { by: s(1) });
    }
    assert_eq!(table.open(&memory, REAPER, START, 999), full(14, 2), "both are adopted");
    // Both end, and everybody with them.
    for state in [State::Active, State::Fencing, State::Fenced, State::Adopting { by: s(1) }] {
        for reaper in &reapers {
            table.change(&memory, reaper.get() - 1, state);
        }
        assert_eq!(table.open(&memory, Kind::default(), START, 1000), full(14, 16), "{state:?}");
        for restarts in [false, true] {
            if restarts {
                table = SessionTable::load(&memory, &config, 0).unwrap().0;
                table.repair(&memory);
            }
            let before = table.term(s(15));
            let heir = table.open(&memory, REAPER, START, 1000).unwrap();
            assert_eq!((heir, table.state(heir)), (s(15), State::Active), "{state:?}, {restarts}");
            assert!(table.term(heir) > before, "it is somebody else");
            assert!(table.offer(heir, 1000).is_some(), "it is asked to clean up");
            table.change(&memory, 14, state);
        }
    }
}

#[test]
fn whoever_asks_most_often_does_not_keep_others_from_recovering() {
    let config =
        ServerConfig { max_sessions: 16, lease_ns: 8000, ..ServerConfig::tiny(ServerId::new(0), 2, 1) };
    let memory = VecMemory::new(&layout::regions(&config));
    layout::format(&memory, &config);
    let mut table = SessionTable::load(&memory, &config, 0).unwrap().0;
    let [victim, busy, busier, patient] =
        [(); 4].map(|()| table.open(&memory, Kind::default(), START, 0).unwrap());
    table.begin_fence(&memory, victim, true, 0).unwrap();
    let mut came = None;
    for now in 0..20_000 {
        // Two ask all the time and do nothing, an honest one now and then.
        for asker in [busy, busier] {
            table.renew(&memory, asker, now);
            table.offer(asker, now);
        }
        if now % 100 == 50 {
            table.renew(&memory, patient, now);
            if table.offer(patient, now) == Some(victim) {
                came = came.or(Some(now));
            }
        }
    }
    assert!(came.is_some_and(|now| now < 6000), "it was asked at {came:?}");
}

#[test]
fn numbers_that_reapers_have_are_not_kept_back_beside_them() {
    let (memory, _, mut table) = big_world();
    let reapers = fill(&mut table, &memory, REAPER);
    assert_eq!(reapers.len(), 16, "two, and the others like any session");
    for reaper in &reapers {
        table.begin_fence(&memory, *reaper, true, 0).unwrap();
    }
    assert!(table.open(&memory, Kind::default(), START, 0).is_err());
    let heir = table.open(&memory, REAPER, START, 0).unwrap();
    for victim in reapers.iter().copied().filter(|reaper| *reaper != heir) {
        let term = table.term(victim);
        table.complete_fence(&memory, victim, term).unwrap();
        table.begin_adopt(&memory, victim, heir).unwrap();
        table.release(&memory, victim);
    }
    assert!(table.open(&memory, Kind::default(), START, 0).is_ok());
}
