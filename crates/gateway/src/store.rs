//! Where the gateway keeps keys and values: an index of a pool, or in tests whatever else has its operations.

use farwood_fabric::Endpoint;
use farwood_fabric::control::ControlError;
use farwood_index::index::Handle;
use farwood_index::{AnyEngine, Engine, Index, IndexError, OrderedIndex, Pool};
use std::sync::OnceLock;

/// Opens the place for keys and values, once for every session of the gateway.
pub trait Backing: Send + Sync + 'static {
    /// What it opens.
    type Store: Store;

    /// Opens it. Runs on the first thread of the gateway.
    fn open(&self, pool: &Pool, endpoint: &Endpoint)
    -> impl Future<Output = Result<Self::Store, IndexError>>;

    /// Opens it after servers have lost their memory; makes it, empty, if it went with that.
    fn open_or_make(
        &self,
        pool: &Pool,
        endpoint: &Endpoint,
    ) -> impl Future<Output = Result<Self::Store, IndexError>> {
        self.open(pool, endpoint)
    }
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
#[derive(Debug)]
pub struct NamedIndex {
    name: String,
    /// Its engine, since it was first open.
    engine: OnceLock<AnyEngine>,
}

impl NamedIndex {
    /// The index with this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), engine: OnceLock::new() }
    }
}

impl Backing for NamedIndex {
    type Store = Index;

    async fn open_or_make(&self, pool: &Pool, endpoint: &Endpoint) -> Result<Index, IndexError> {
        let absent = match self.open(pool, endpoint).await {
            Err(error) if is_missing(&error) => error,
            opened => return opened,
        };
        let Some(engine) = self.engine.get() else { return Err(absent) };
        match Index::create(pool, endpoint, &self.name, engine).await {
            // Another gateway was faster.
            Err(error) if matches!(control(&error), Some(ControlError::NameExists { .. })) => {
                self.open(pool, endpoint).await
            }
            made => made.inspect(|_| {
                tracing::warn!("index '{}' went with the memory; it was made anew, empty", self.name);
            }),
        }
    }

    async fn open(&self, pool: &Pool, endpoint: &Endpoint) -> Result<Index, IndexError> {
        let index = Index::open(pool, endpoint, &self.name).await?;
        match index.engine().key_bytes() {
            None => {
                self.engine.get_or_init(|| index.engine().clone());
                Ok(index)
            }
            Some(bytes) => {
                let (name, engine) = (&self.name, index.engine().name());
                let why = format!(
                    "index '{name}' ({engine}) takes only keys of {bytes} bytes; a gateway needs one that takes any"
                );
                Err(IndexError::BadConfig { why })
            }
        }
    }
}

/// Whether there is no index of this name.
fn is_missing(error: &IndexError) -> bool {
    matches!(control(error), Some(ControlError::NoSuchIndex { .. }))
}

/// Whether there is no index of this name that a gateway can serve.
pub(crate) fn lacks_index(error: &IndexError) -> bool {
    is_missing(error) || matches!(error, IndexError::BadConfig { .. })
}

/// What a memory server refused, if that is what happened.
fn control(error: &IndexError) -> Option<&ControlError> {
    match error {
        IndexError::Fabric(error) => error.control(),
        _ => None,
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
