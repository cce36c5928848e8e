//! Gateways as clients see them: beside a real Redis, under clients that do not behave, with a real client library.
//!
//! One binary, since each would have all of the gateway in it.

mod clients;
mod common;
mod differential;
mod full;
mod fuzz;
mod hostile;
mod limits;
mod sizes;
