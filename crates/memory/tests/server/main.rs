//! The memory server from outside: requests in, actions out, against models that know nothing of its tables.

#![expect(clippy::single_match_else, reason = "a model reads best as a table of cases")]
#![expect(clippy::needless_pass_by_value, reason = "requests are made where they are asked")]

mod calls;
mod catalog_model;
mod chunk_model;
mod crash;
mod driver;
mod dropped;
mod offline;
mod session_model;
mod storm;
mod wrong_client;
