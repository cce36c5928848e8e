//! Where the gateway keeps keys and values: an index of a pool, or in tests whatever else has its operations.

use farwood_fabric::Endpoint;
use farwood_index::index::Handle;
use farwood_index::{Engine, Index, IndexError, OrderedIndex, Pool};

/// Opens the place for keys and values, once for every session of the gateway.
pub trait Backing: Send + Sync + 'static {
    /// What it opens.
    type Store: Store;

    /// Opens it. Runs on the first thread of the gateway.
    fn open(&self, pool: &Pool, endpoint: &Endpoint)
    -> impl Future<Output = Result<Self::Store, IndexError>>;
}

/// A place for keys and values, as the threads of one gateway share it.
pub trait Store: Clone + Send + Sync + 'static {
    /// Its operations, for one task at a time.
    type Handle: OrderedIndex + 'static;

    /// Operations for one task of the endpoint's thread.
    fn handle(&self, endpoint: &Endpoint) -> Result<Self::Handle, IndexError>;

    /// The engine behind it.
    fn engine(&self) -> &'static str;

    /// How many bytes this process spends on it.
    fn cache_bytes(&self) -> u64;
}

/// An index of the pool, by its name.
#[derive(Clone, Debug)]
pub struct NamedIndex(pub String);

impl Backing for NamedIndex {
    type Store = Index;

    async fn open(&self, pool: &Pool, endpoint: &Endpoint) -> Result<Index, IndexError> {
        let index = Index::open(pool, endpoint, &self.0).await?;
        match index.engine().key_bytes() {
            None => Ok(index),
            Some(bytes) => {
                let (name, engine) = (&self.0, index.engine().name());
                let why = format!(
                    "index '{name}' ({engine}) takes only keys of {bytes} bytes; a gateway needs one that takes any"
                );
                Err(IndexError::BadConfig { why })
            }
        }
    }
}

impl Store for Index {
    type Handle = Handle;

    fn handle(&self, endpoint: &Endpoint) -> Result<Handle, IndexError> {
        Index::handle(self, endpoint)
    }

    fn engine(&self) -> &'static str {
        Index::engine(self).name()
    }

    fn cache_bytes(&self) -> u64 {
        Index::cache_bytes(self)
    }
}
