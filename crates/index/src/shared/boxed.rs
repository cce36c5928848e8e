//! Large futures on the heap, made where they run.
//!
//! `Box::pin(future)` makes the future on the stack and copies all of it, kilobytes for what changes the shape of a tree. Stored into a
//! place that is on the heap already, only what it begins with is written.

/// Awaits a future on the heap.
pub(crate) async fn boxed<F: Future>(make: impl FnOnce() -> F) -> F::Output {
    // Not `Box::pin(None)`, which copies that, too.
    let mut place = Box::into_pin(Box::<Option<F>>::default());
    place.as_mut().set(Some(make()));
    match place.as_mut().as_pin_mut() {
        Some(future) => future.await,
        // It was stored just now.
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::Executor;

    #[test]
    fn it_brings_what_the_future_brings() {
        let executor = Executor::new();
        let work = async |n: u32| {
            let large = [n; 1024];
            Executor::current().expect("tests run on one").yield_now().await;
            large.iter().sum::<u32>()
        };
        assert_eq!(executor.block_on(boxed(|| work(2))), 2048);
    }
}
