//! When a repair does nothing: others are there, the index is damaged, it is only a dry run; and what a check says
//! meanwhile.

use super::world::{INDEX, Tried, inject, join, new_world, open, text, value};
use farwood_fabric::control::{ControlError, IndexState, ObjectChunk};
use farwood_fabric::transport::sim::Sim;
use farwood_fabric::{Endpoint, GlobalAddr};
use farwood_index::engine::sphinx::{Config, Sphinx};
use farwood_index::repair::{self, Mode};
use farwood_index::{Engine, IndexError, OrderedIndex, Pool};
use fastrand::Rng;

const KEYS: u64 = 40;

/// An index with some keys, and leaks; where they are.
async fn make(sim: &Sim, engine: &Sphinx) -> Tried<Vec<GlobalAddr>> {
    let (pool, endpoint) = join(sim, engine).await?;
    engine.create(&pool, &endpoint, INDEX).await.map_err(text)?;
    let index = open(engine, &pool, &endpoint).await.map_err(text)?;
    let mut rng = Rng::with_seed(7);
    for n in 0..KEYS {
        index.put(&n.to_be_bytes(), &value(engine, &mut rng)).await.map_err(text)?;
    }
    drop(index);
    let injected = inject(&pool, &endpoint, (12, true), &mut rng).await?;
    pool.leave(&endpoint).await.map_err(text)?;
    Ok(injected)
}

/// How many of these objects are still taken.
async fn taken(pool: &Pool, endpoint: &Endpoint, objects: &[GlobalAddr]) -> Tried<usize> {
    let (op, mut taken) = (endpoint.op(), 0);
    for addr in objects {
        let bytes = pool.session().cluster().view().chunk_bytes(addr.server());
        let within = (addr.offset() - farwood_fabric::control::MAIN_BASE) % bytes;
        let chunk = GlobalAddr::new(addr.server(), addr.region(), addr.offset() - within);
        let object_bytes = op.read_word(chunk.add(16)).await.map_err(text)? & 0xffff_ffff;
        let layout =
            ObjectChunk::new(bytes, u32::try_from(object_bytes).map_err(text)?).ok_or("no layout")?;
        let object = u64::from(layout.object_at(within).ok_or("no object")?);
        let word = chunk.add(ObjectChunk::BITMAP_OFFSET + object / 64 * 8);
        taken +=
            usize::try_from(op.read_word(word).await.map_err(text)? >> (object % 64) & 1).map_err(text)?;
    }
    Ok(taken)
}

fn engine() -> Sphinx {
    Sphinx::new(Config::tiny())
}

fn control(error: &IndexError) -> Option<ControlError> {
    match error {
        IndexError::Fabric(error) => error.control().cloned(),
        _ => None,
    }
}

async fn repair(pool: &Pool, endpoint: &Endpoint, mode: Mode) -> Result<repair::Findings, IndexError> {
    repair::repair(pool, endpoint, &engine(), INDEX, mode, &mut |_| ()).await
}

#[test]
fn nothing_is_freed_while_others_are_in_the_pool() {
    let sim = new_world(3, "");
    let world = sim.clone();
    let ended = sim.run(async move {
        let injected = make(&world, &engine()).await?;
        let (other, other_endpoint) = join(&world, &engine()).await?;
        let (pool, endpoint) = join(&world, &engine()).await?;
        let refused = repair(&pool, &endpoint, Mode::Free).await.expect_err("somebody is there");
        let Some(ControlError::IndexInUse { others, .. }) = control(&refused) else { panic!("{refused}") };
        assert_eq!(others.iter().map(|info| info.session).collect::<Vec<_>>(), [other.session().id()]);
        let checked = repair::check(&pool, &endpoint, &engine(), INDEX, &mut |_| ()).await.map_err(text)?;
        assert!(checked.linked > KEYS && checked.leaks.is_none(), "{checked:?}");
        other.leave(&other_endpoint).await.map_err(text)?;

        // A dry run and a check count them, and free none.
        let dry = repair(&pool, &endpoint, Mode::DryRun).await.map_err(text)?;
        let found = dry.leaks.clone().expect("counted").total().objects;
        // Two extents of raw bytes beside the bits.
        assert_eq!(found, injected.len() as u64 + 2);
        let checked = repair::check(&pool, &endpoint, &engine(), INDEX, &mut |_| ()).await.map_err(text)?;
        assert_eq!(checked, dry);
        assert_eq!(taken(&pool, &endpoint, &injected).await?, injected.len());

        let freed = repair(&pool, &endpoint, Mode::Free).await.map_err(text)?;
        assert_eq!(freed, dry, "what is freed is what was counted");
        assert_eq!(taken(&pool, &endpoint, &injected).await?, 0);
        Tried::Ok(())
    });
    ended.expect("it ends").expect("as expected");
}

/// Whoever has the index open in the session of the repairer would go on to use it.
#[test]
fn a_session_that_has_the_index_open_does_not_repair_it() {
    let sim = new_world(4, "");
    let world = sim.clone();
    let ended = sim.run(async move {
        make(&world, &engine()).await?;
        let (pool, endpoint) = join(&world, &engine()).await?;
        let index = open(&engine(), &pool, &endpoint).await.map_err(text)?;
        let refused = repair(&pool, &endpoint, Mode::Free).await;
        assert!(matches!(refused, Err(IndexError::BadConfig { .. })), "{refused:?}");
        // It is in use again.
        index.put(b"more", b"value").await.map_err(text)?;
        drop(index);
        repair(&pool, &endpoint, Mode::Free).await.map_err(text)?;
        Tried::Ok(())
    });
    ended.expect("it ends").expect("as expected");
}

#[test]
fn nothing_is_freed_of_an_index_that_is_damaged() {
    for seed in 0..12u64 {
        let sim = new_world(seed, "");
        let world = sim.clone();
        let ended = sim.run(async move {
            let injected = make(&world, &engine()).await?;
            let (pool, endpoint) = join(&world, &engine()).await?;
            let attached = engine().attach(&pool, &endpoint, INDEX).await.map_err(text)?;
            let linked = engine().check(&attached, &endpoint).await.map_err(text)?;
            drop(attached);
            // A leaf: those come before nodes in the numbers of classes. One bit of its value or key.
            let leaves: Vec<_> = linked.iter().filter(|(class, _)| class.class < 128).collect();
            let (_, leaf) = leaves[usize::try_from(seed).unwrap_or(0) % leaves.len()];
            let word = leaf.add(24);
            let op = endpoint.op();
            let before = op.read_word(word).await.map_err(text)?;
            op.write_word(word, before ^ 1 << (seed * 5)).await.map_err(text)?;
            drop(op);
            let refused = repair(&pool, &endpoint, Mode::Free).await;
            assert!(matches!(refused, Err(IndexError::Corrupt { .. })), "{refused:?}");
            assert_eq!(taken(&pool, &endpoint, &injected).await?, injected.len());
            let infos = pool.list_indexes(&endpoint.op()).await.map_err(text)?;
            assert!(infos.iter().all(|info| info.state == IndexState::Ready), "{infos:?}");
            endpoint.op().write_word(word, before).await.map_err(text)?;
            repair(&pool, &endpoint, Mode::Free).await.map_err(text)?;
            Tried::Ok(())
        });
        ended.expect("it ends").expect("as expected");
    }
}

/// An object that is linked, and whose bit is clear: it may be in use twice already.
#[test]
fn nothing_is_freed_where_a_linked_object_is_free() {
    let sim = new_world(5, "");
    let world = sim.clone();
    let ended = sim.run(async move {
        let injected = make(&world, &engine()).await?;
        let (pool, endpoint) = join(&world, &engine()).await?;
        let attached = engine().attach(&pool, &endpoint, INDEX).await.map_err(text)?;
        let linked = engine().check(&attached, &endpoint).await.map_err(text)?;
        drop(attached);
        let (class, addr) = linked[linked.len() / 2];
        pool.heap().free_unpublished(class, addr);
        let refused = repair(&pool, &endpoint, Mode::Free).await;
        assert!(matches!(refused, Err(IndexError::Corrupt { .. })), "{refused:?}");
        assert_eq!(taken(&pool, &endpoint, &injected).await?, injected.len());
        Tried::Ok(())
    });
    ended.expect("it ends").expect("as expected");
}
