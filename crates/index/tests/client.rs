//! The client from many threads, and as futures: what it promises, and how it ends.

use farwood_fabric::{Executor, Session, SessionOptions};
use farwood_index::{AnyEngine, Client, IndexError};
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

fn sherman() -> AnyEngine {
    AnyEngine::named("sherman", 8, 8).expect("it exists")
}

fn client(threads: usize) -> Client {
    let cluster = farwood_memory::embedded(2, 64 << 20).expect("there is memory");
    Client::new(&cluster, threads).expect("it joins")
}

#[test]
fn many_threads_share_a_client_and_lose_nothing() {
    let client = client(2);
    let index = client.create("shared", &sherman()).wait().expect("created");
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let index = index.clone();
            scope.spawn(move || {
                let mut under_way = Vec::new();
                for n in 0..500u64 {
                    let key = (n * 8 + thread).to_be_bytes();
                    under_way.push((key, index.put(key, key)));
                }
                for (key, put) in under_way {
                    put.wait().expect("it is put");
                    assert_eq!(index.get(key).wait(), Ok(Some(key.to_vec())));
                }
            });
        }
    });
    let all = index.scan(.., usize::MAX).wait().expect("scanned");
    let expected: Vec<_> =
        (0..4000u64).map(|n| (n.to_be_bytes().to_vec(), n.to_be_bytes().to_vec())).collect();
    assert_eq!(all, expected);
    let mut back = index.scan_back(.., usize::MAX).wait().expect("scanned");
    back.reverse();
    assert_eq!(back, expected);
    assert!(index.check().wait().is_ok_and(|nodes| nodes > 4000 / 48));
}

/// Every operation against a map, one after the other.
#[test]
fn operations_do_what_they_do_to_a_map() {
    let client = client(1);
    let index = client.create("tried", &sherman()).wait().expect("created");
    let mut map = BTreeMap::new();
    let mut random = 12_345u64;
    let mut draw = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    for _ in 0..5000 {
        let (key, value) = (draw(300).to_be_bytes().to_vec(), draw(4).to_be_bytes().to_vec());
        let held = map.get(&key).cloned();
        match draw(7) {
            0 | 1 => {
                index.put(key.clone(), value.clone()).wait().expect("put");
                map.insert(key, value);
            }
            2 => assert_eq!(index.delete(key.clone()).wait(), Ok(map.remove(&key).is_some())),
            3 => {
                assert_eq!(index.put_if_absent(key.clone(), value.clone()).wait(), Ok(held.is_none()));
                map.entry(key).or_insert(value);
            }
            4 => {
                assert_eq!(index.update_if_present(key.clone(), value.clone()).wait(), Ok(held.is_some()));
                map.entry(key).and_modify(|held| *held = value);
            }
            5 => {
                let expected = if draw(2) == 0 { held.clone() } else { Some(value.clone()) };
                let swapped =
                    index.compare_and_swap(key.clone(), expected.clone(), Some(value.clone())).wait();
                assert_eq!(swapped, Ok(held == expected));
                if held == expected {
                    map.insert(key, value);
                }
            }
            _ => assert_eq!(index.get(key).wait(), Ok(held)),
        }
    }
    let all: Vec<_> = map.into_iter().collect();
    assert_eq!(index.scan(.., usize::MAX).wait(), Ok(all));
}

#[test]
fn indexes_come_and_go_by_name() {
    let client = client(2);
    assert_eq!(client.indexes().wait(), Ok(vec![]));
    let first = client.create("first", &sherman()).wait().expect("created");
    assert!(client.create("first", &sherman()).wait().is_err_and(|e| e.to_string().contains("exists")));
    first.put(1u64.to_be_bytes(), [1; 8]).wait().expect("put");
    let again = client.open("first").wait().expect("opened");
    assert_eq!(again.get(1u64.to_be_bytes()).wait(), Ok(Some(vec![1; 8])));
    assert!(matches!(again.put([1; 3], [1; 8]).wait(), Err(IndexError::BadKey { .. })));
    assert!(matches!(again.put([1; 8], [1; 9]).wait(), Err(IndexError::BadValue { .. })));
    assert!(AnyEngine::named("bplus", 8, 8).is_err());
    let wide = AnyEngine::named("fg+", 20, 100).expect("it exists");
    let wide = client.create("wide", &wide).wait().expect("created");
    wide.put([7; 20], [8; 100]).wait().expect("put");
    assert_eq!(client.open("wide").wait().expect("opened").get([7; 20]).wait(), Ok(Some(vec![8; 100])));
    drop((first, again));
    client.drop_index("first").wait().expect("dropped");
    assert_eq!(client.indexes().wait(), Ok(vec!["wide".to_owned()]));
    assert!(client.open("first").wait().is_err());
}

/// Counts how often it is woken.
struct Bell(std::sync::Mutex<bool>, std::sync::Condvar);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *self.0.lock().expect("no panic") = true;
        self.1.notify_all();
    }
}

/// A runtime of the smallest kind, which is not ours.
fn run<T>(future: impl Future<Output = T>) -> T {
    let bell = Arc::new(Bell(std::sync::Mutex::new(false), std::sync::Condvar::new()));
    let waker = Waker::from(Arc::clone(&bell));
    let mut future = std::pin::pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        let rung = bell.0.lock().expect("no panic");
        *bell.1.wait_while(rung, |rung| !*rung).expect("no panic") = false;
    }
}

#[test]
fn operations_are_futures_for_any_runtime_and_end_though_the_client_is_gone() {
    let client = client(1);
    let index = client.create("async", &sherman()).wait().expect("created");
    let value = run(async {
        index.put([1; 8], [2; 8]).await?;
        index.get([1; 8]).await
    });
    assert_eq!(value, Ok(Some(vec![2; 8])));
    let last: Vec<_> = (0..100u64).map(|n| index.put(n.to_be_bytes(), [3; 8])).collect();
    drop((index, client));
    for put in last {
        assert_eq!(put.wait(), Ok(()));
    }
}

/// A client that was fenced, as happens to one that was silent for longer than its lease, says so and what to do; another one goes on.
#[test]
fn a_fenced_client_says_so_and_joins_again() {
    let cluster = farwood_memory::embedded(2, 64 << 20).expect("there is memory");
    let fenced = Client::new(&cluster, 2).expect("it joins");
    let index = fenced.create("kept", &sherman()).wait().expect("created");
    assert_eq!(index.put([1; 8], [2; 8]).wait(), Ok(()));
    Executor::new().block_on(async {
        let warden = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = warden.endpoint().expect("an endpoint");
        let sessions = warden.list(&endpoint.op()).await.expect("listed");
        let victim = sessions.iter().find(|info| info.session != warden.id()).expect("the client's");
        warden.evict(&endpoint.op(), victim.session, victim.term).await.expect("fenced");
        warden.close(&endpoint).await.expect("closed");
    });
    let mut refused = 0;
    while let Err(error) = index.put([7; 8], [3; 8]).wait() {
        assert_eq!(error, IndexError::Fenced);
        let said = error.to_string();
        assert!(said.contains("fenced") && said.contains("new"), "{said}");
        let next = Client::new(&cluster, 1).expect("it joins");
        let again = next.open("kept").wait().expect("opened");
        let seen = again.get([7; 8]).wait();
        assert_eq!(seen, Ok(None), "what was refused did not happen, {refused} times");
        refused += 1;
    }
    assert_eq!(index.get([1; 8]).wait(), Ok(Some(vec![2; 8])));
    assert_eq!(index.put([1; 8], [4; 8]).wait(), Ok(()), "no lock is in the way");
    drop((index, fenced));
    let next = Client::new(&cluster, 1).expect("it joins");
    let again = next.open("kept").wait().expect("opened");
    assert_eq!(again.get([1; 8]).wait(), Ok(Some(vec![4; 8])));
    assert!(again.check().wait().is_ok());
}

#[test]
fn a_full_pool_is_said_and_what_is_there_stays() {
    let cluster = farwood_memory::embedded(1, 16 << 20).expect("there is memory");
    let client = Client::new(&cluster, 1).expect("it joins");
    let wide = AnyEngine::named("sherman", 8, 1000).expect("it exists");
    let index = client.create("full", &wide).wait().expect("created");
    let mut keys = 0..1_000_000u64;
    let full = keys.find_map(|n| index.put(n.to_be_bytes(), [1; 1000]).wait().err());
    assert!(matches!(full, Some(IndexError::PoolFull(_))), "{full:?}");
    let put = keys.start - 1;
    assert!(put > 1000, "only {put} keys fitted");
    for n in 0..put {
        assert_eq!(index.get(n.to_be_bytes()).wait(), Ok(Some(vec![1; 1000])), "key {n}");
    }
    assert_eq!(index.get(put.to_be_bytes()).wait(), Ok(None), "what was refused did not happen");
    assert_eq!(index.update_if_present(0u64.to_be_bytes(), [2; 1000]).wait(), Ok(true));
    assert_eq!(index.delete(1u64.to_be_bytes()).wait(), Ok(true));
    assert!(index.check().wait().is_ok());
}
