//! RDMA devices: which there are, and one that is open, with the port and address that connections use.
//!
//! The safe layer begins here. A [`Domain`] is an open device with its protection domain; memory regions and queues hold it, so
//! that it goes after them.

use super::error::VerbsError;
use super::sys;
use std::ffi::CStr;
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// So many entries of a port's address table are looked at.
const MAX_GIDS: i32 = 256;

fn library() -> Result<&'static sys::Library, VerbsError> {
    sys::library().map_err(|why| VerbsError::NoLibrary { why })
}

/// Calls `work` with each device and its name until it brings something.
fn find<T>(mut work: impl FnMut(NonNull<sys::Device>, &str) -> Option<T>) -> Result<Option<T>, VerbsError> {
    let library = library()?;
    let mut count = 0;
    // SAFETY: the list is ours until it is freed below; it has `count` entries.
    let list = unsafe { (library.get_device_list)(&raw mut count) };
    if list.is_null() {
        let error = io::Error::last_os_error();
        // ENOSYS: the kernel has no RDMA at all.
        let none = error.raw_os_error() == Some(rustix::io::Errno::NOSYS.raw_os_error());
        return Err(if none {
            VerbsError::NoDevice
        } else {
            VerbsError::Failed { what: "list its kind", error }
        });
    }
    let mut found = None;
    for n in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: entry `n` of `count`; names are C strings that live as long as the list.
        let (device, name) = unsafe {
            let Some(device) = NonNull::new(*list.add(n)) else { continue };
            (device, CStr::from_ptr((library.get_device_name)(device.as_ptr())))
        };
        found = work(device, &name.to_string_lossy());
        if found.is_some() {
            break;
        }
    }
    // SAFETY: from `get_device_list`; open devices do not need it any more.
    unsafe { (library.free_device_list)(list) };
    Ok(found)
}

/// The names of all devices.
pub(super) fn names() -> Result<Vec<String>, VerbsError> {
    let mut names = Vec::new();
    find::<()>(|_, name| {
        names.push(name.to_owned());
        None
    })?;
    Ok(names)
}

/// An open device.
pub(super) struct Context {
    raw: NonNull<sys::Context>,
    library: &'static sys::Library,
    name: String,
    attr: sys::DeviceAttr,
}

// SAFETY: libibverbs' objects may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above; what is not synchronised by the library is not used here.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn open(name: &str) -> Result<Arc<Self>, VerbsError> {
        let library = library()?;
        let mut there = Vec::new();
        let opened = find(|device, found| {
            there.push(found.to_owned());
            (found == name).then(|| {
                // SAFETY: the device is in the list, which has not been freed.
                let raw = unsafe { (library.open_device)(device.as_ptr()) };
                NonNull::new(raw).ok_or_else(|| VerbsError::last("be opened"))
            })
        })?;
        let Some(opened) = opened else {
            let none = there.is_empty();
            return Err(if none {
                VerbsError::NoDevice
            } else {
                VerbsError::NoSuchDevice { name: name.to_owned(), there }
            });
        };
        let raw = opened?;
        // SAFETY: all zeroes are a valid value of these integers; the library fills it.
        let mut attr: sys::DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: an open context and a place for the answer.
        let queried = unsafe { (library.query_device)(raw.as_ptr(), &raw mut attr) };
        let context = Arc::new(Self { raw, library, name: name.to_owned(), attr });
        VerbsError::check("say what it can do", queried)?;
        Ok(context)
    }

    pub(super) fn raw(&self) -> *mut sys::Context {
        self.raw.as_ptr()
    }

    /// The operations on the data path.
    pub(super) fn operations(&self) -> &sys::Context {
        // SAFETY: open as long as `self`; the operations do not change.
        unsafe { self.raw.as_ref() }
    }

    pub(super) fn library(&self) -> &'static sys::Library {
        self.library
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn attr(&self) -> &sys::DeviceAttr {
        &self.attr
    }

    /// The operations in front of the context, if there are as many as we know.
    pub(super) fn extended(&self) -> Option<&sys::Extended> {
        if self.operations().abi_compat != usize::MAX {
            return None;
        }
        // SAFETY: an extended context lies inside a `verbs_context`, of which `sz` bytes count from its end.
        let size = unsafe { self.raw.as_ptr().cast::<usize>().sub(1).read() };
        if size < size_of::<sys::Extended>() {
            return None;
        }
        // SAFETY: all of it is there, as just checked.
        Some(unsafe {
            self.raw.byte_sub(std::mem::offset_of!(sys::Extended, context)).cast::<sys::Extended>().as_ref()
        })
    }

    /// How much on-chip memory the device hands out.
    pub(super) fn device_memory_bytes(&self) -> u64 {
        let Some(query) = self.extended().and_then(|extended| extended.query_device_ex) else { return 0 };
        let mut attr = sys::DeviceAttrEx { bytes: [0; 1024] };
        // SAFETY: room for more than any version writes, and its size.
        let failed = unsafe { query(self.raw(), std::ptr::null(), &raw mut attr, size_of_val(&attr)) };
        if failed != 0 {
            return 0;
        }
        let field = attr.bytes[sys::MAX_DM_SIZE_AT..].first_chunk().copied().unwrap_or_default();
        u64::from_ne_bytes(field)
    }

    pub(super) fn port(&self, number: u8) -> Result<sys::PortAttr, VerbsError> {
        let mut attr = sys::PortAttr::default();
        // SAFETY: an open context and a place for the answer.
        let queried = unsafe { (self.library.query_port)(self.raw(), number, &raw mut attr) };
        VerbsError::check("describe its port", queried)?;
        Ok(attr)
    }

    fn gid(&self, port: u8, index: i32) -> Option<[u8; 16]> {
        let mut gid = [0; 16];
        // SAFETY: an open context and a place for the answer.
        let failed = unsafe { (self.library.query_gid)(self.raw(), port, index, &raw mut gid) };
        (failed == 0 && gid != [0; 16]).then_some(gid)
    }

    /// The port that connections use: the first that is active and has an address.
    pub(super) fn active_port(&self) -> Result<Port, VerbsError> {
        for number in 1..=self.attr.phys_port_cnt {
            let attr = self.port(number)?;
            if attr.state == sys::PORT_ACTIVE {
                if let Some(port) = self.address(number, &attr) {
                    return Ok(port);
                }
            }
        }
        Err(VerbsError::NotConnected { device: self.name.clone() })
    }

    fn address(&self, number: u8, attr: &sys::PortAttr) -> Option<Port> {
        let is_ethernet = u32::from(attr.link_layer) == sys::LINK_LAYER_ETHERNET;
        let gids = (0..attr.gid_tbl_len.min(MAX_GIDS)).filter_map(|index| {
            let (gid, index) = (self.gid(number, index)?, u8::try_from(index).ok()?);
            Some((rank(&gid, &self.gid_type(number, index)), std::cmp::Reverse(index), gid))
        });
        // InfiniBand's own addresses are all alike.
        let (_, std::cmp::Reverse(gid_index), gid) =
            if is_ethernet { gids.max()? } else { gids.min_by_key(|gid| gid.1.0)? };
        Some(Port {
            number,
            is_ethernet,
            gid_index,
            gid,
            lid: attr.lid,
            mtu: attr.active_mtu,
            max_message_bytes: attr.max_msg_sz.max(1 << 20),
        })
    }

    /// What the system says of an address: "RoCE v2", or something else.
    fn gid_type(&self, port: u8, index: u8) -> String {
        let path = format!("/sys/class/infiniband/{}/ports/{port}/gid_attrs/types/{index}", self.name);
        std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
    }
}

/// How good an address is: routable RoCE v2 is best, and IPv4 is what most networks route.
fn rank(gid: &[u8; 16], kind: &str) -> u8 {
    let is_ipv4 = gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    let is_link_local = gid[..2] == [0xfe, 0x80];
    match (kind == "RoCE v2", is_ipv4, is_link_local) {
        (true, true, _) => 3,
        (true, _, false) => 2,
        (true, _, true) => 1,
        (false, ..) => 0,
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything that was made of it held it, and is gone.
        unsafe { (self.library.close_device)(self.raw()) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.name)
    }
}

/// A port, as connections use it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Port {
    pub(super) number: u8,
    pub(super) is_ethernet: bool,
    pub(super) gid_index: u8,
    pub(super) gid: [u8; 16],
    pub(super) lid: u16,
    /// In the library's numbers: 1 is 256 bytes, each next one twice as many.
    pub(super) mtu: u32,
    pub(super) max_message_bytes: u32,
}

/// An open device with a protection domain: what memory is registered with and queues are made in.
pub(crate) struct Domain {
    raw: NonNull<sys::Pd>,
    context: Arc<Context>,
    port: Port,
    id: u64,
}

// SAFETY: as for `Context`.
unsafe impl Send for Domain {}
// SAFETY: as for `Context`.
unsafe impl Sync for Domain {}

impl Domain {
    /// Opens this device, or the first one that can be used.
    pub(crate) fn open(device: Option<&str>) -> Result<Arc<Self>, VerbsError> {
        let names = match device {
            Some(name) => vec![name.to_owned()],
            None => names()?,
        };
        let mut failure = VerbsError::NoDevice;
        for name in names {
            match Self::open_one(&name) {
                Ok(domain) => return Ok(domain),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    fn open_one(name: &str) -> Result<Arc<Self>, VerbsError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let context = Context::open(name)?;
        if context.attr().atomic_cap == 0 {
            return Err(VerbsError::NoAtomics { device: name.to_owned() });
        }
        let port = context.active_port()?;
        // SAFETY: an open context.
        let raw = unsafe { (context.library().alloc_pd)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("make a protection domain"))?;
        Ok(Arc::new(Self { raw, context, port, id: NEXT.fetch_add(1, Ordering::Relaxed) }))
    }

    pub(super) fn raw(&self) -> *mut sys::Pd {
        self.raw.as_ptr()
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn port(&self) -> &Port {
        &self.port
    }

    /// The device's name.
    pub(crate) fn device(&self) -> &str {
        self.context.name()
    }

    /// Tells domains of this process apart.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Whether the device's atomics and those of the processor are atomic among each other.
    pub(crate) fn atomics_are_global(&self) -> bool {
        u32::try_from(self.context.attr().atomic_cap) == Ok(sys::ATOMIC_GLOB)
    }

    /// How many READs and atomics one queue pair may have under way.
    pub(super) fn reads_at_once(&self) -> u8 {
        let attr = self.context.attr();
        u8::try_from(attr.max_qp_rd_atom.min(attr.max_qp_init_rd_atom).clamp(1, 16)).unwrap_or(1)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: regions and queues held it, and are gone.
        unsafe { (self.context.library().dealloc_pd)(self.raw()) };
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Domain({})", self.context.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routable_addresses_come_first() {
        let ipv4 = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1];
        let mut local = [0; 16];
        (local[0], local[1], local[15]) = (0xfe, 0x80, 1);
        let mut ipv6 = local;
        ipv6[0] = 0x20;
        let ranks = [
            rank(&ipv4, "IB/RoCE v1"),
            rank(&local, "RoCE v2"),
            rank(&ipv6, "RoCE v2"),
            rank(&ipv4, "RoCE v2"),
        ];
        assert!(ranks.is_sorted() && ranks.windows(2).all(|pair| pair[0] < pair[1]), "{ranks:?}");
    }
}
