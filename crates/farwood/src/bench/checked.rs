//! An index whose every answer is checked against a [`Model`] (`--verify`), or none at all.
//!
//! What the model refuses becomes an error of the operation, so that it is counted and quoted like any other.

use super::verify::{Model, Scan, Violation, WriteTicket};
use farwood_index::{Engine, IndexError, KeyValue, OrderedIndex};
use std::ops::Bound;
use std::sync::Arc;

/// An index and the model that knows what it may answer.
#[derive(Debug)]
pub(super) struct Checked<I> {
    index: I,
    model: Option<Arc<Model>>,
}

impl<I: OrderedIndex> Checked<I> {
    pub(super) fn new(index: I, model: Option<Arc<Model>>) -> Self {
        Self { index, model }
    }

    /// A key that is stored before the run.
    pub(super) async fn load(&self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.index.put(key, value).await?;
        if let Some(model) = self.model.as_ref().filter(|model| !model.knows_what_was_loaded()) {
            model.load(key, value);
        }
        Ok(())
    }

    /// All keys that are stored before the run, in order.
    pub(super) async fn bulk_load<E: Engine<Index = I>>(
        &self,
        engine: &E,
        pairs: impl Iterator<Item = KeyValue>,
        fill: f64,
    ) -> Result<(), IndexError> {
        let model = self.model.as_ref().filter(|model| !model.knows_what_was_loaded());
        let pairs = pairs.inspect(|(key, value)| {
            if let Some(model) = model {
                model.load(key, value);
            }
        });
        engine.bulk_load(&self.index, pairs, fill).await.map(drop)
    }

    /// An operation that may write `new` to `key`; `judge` tells the model what became of it.
    #[inline]
    async fn write<T>(
        &self,
        key: &[u8],
        new: Option<&[u8]>,
        operation: impl Future<Output = Result<T, IndexError>>,
        judge: impl FnOnce(&Model, WriteTicket, &T) -> Result<(), Violation>,
    ) -> Result<T, IndexError> {
        let Some(model) = &self.model else { return operation.await };
        let ticket = model.begin_write(key, new);
        let result = operation.await;
        let judged = match &result {
            Ok(answer) => judge(model, ticket, answer),
            // It may still happen until the fence is complete.
            Err(IndexError::Fenced) => {
                model.unknown(ticket);
                Ok(())
            }
            Err(error) if error.is_unknown() => {
                model.settled(ticket);
                Ok(())
            }
            Err(_) => model.failed(ticket),
        };
        judged.map_err(|violation| wrong(&violation))?;
        result
    }
}

fn wrong(violation: &Violation) -> IndexError {
    IndexError::Corrupt { what: format!("a wrong answer: {violation}") }
}

impl<I: OrderedIndex> OrderedIndex for Checked<I> {
    #[inline]
    async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        let Some(model) = &self.model else { return self.index.get(key).await };
        let ticket = model.begin_read();
        match self.index.get(key).await {
            Ok(value) => model
                .got(ticket, key, value.as_deref())
                .map_err(|violation| wrong(&violation))
                .map(|()| value),
            Err(error) => {
                model.abandoned(ticket);
                Err(error)
            }
        }
    }

    #[inline]
    async fn put(&self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        let put = self.index.put(key, value);
        self.write(key, Some(value), put, |model, ticket, ()| model.wrote(ticket)).await
    }

    async fn compare_and_swap(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, IndexError> {
        let swap = self.index.compare_and_swap(key, expected, new);
        self.write(key, new, swap, |model, ticket, happened| model.swapped(ticket, expected, *happened)).await
    }

    async fn put_if_absent(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        let put = self.index.put_if_absent(key, value);
        self.write(key, Some(value), put, |model, ticket, absent| model.inserted(ticket, *absent)).await
    }

    async fn update_if_present(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        let update = self.index.update_if_present(key, value);
        self.write(key, Some(value), update, |model, ticket, present| model.updated(ticket, *present)).await
    }

    async fn delete(&self, key: &[u8]) -> Result<bool, IndexError> {
        let delete = self.index.delete(key);
        self.write(key, None, delete, |model, ticket, existed| model.deleted(ticket, *existed)).await
    }

    async fn scan(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
    ) -> Result<Vec<KeyValue>, IndexError> {
        let Some(model) = &self.model else { return self.index.scan(start, end, limit, reverse).await };
        let ticket = model.begin_read();
        match self.index.scan(start, end, limit, reverse).await {
            Ok(pairs) => {
                let scan = Scan { start, end, limit, reverse };
                model.scanned(ticket, scan, &pairs).map_err(|violation| wrong(&violation)).map(|()| pairs)
            }
            Err(error) => {
                model.abandoned(ticket);
                Err(error)
            }
        }
    }
}
