//! What we use of libibverbs, declared by hand and loaded at run time: the project builds and runs without it.
//!
//! Names, layouts and numbers are those of `infiniband/verbs.h` (rdma-core). Most functions are symbols of the library; those on the
//! data path (`poll_cq`, `post_send`, ...) are pointers in the context, and those for device memory lie in front of it. Sizes
//! are asserted when this is compiled; a test compares every offset with the C header where that is installed.

#![expect(clippy::struct_field_names, reason = "the names are those of the C header")]

use libloading::Library as Shared;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// The library's file.
pub(super) const LIBRARY: &str = "libibverbs.so.1";

macro_rules! opaque {
    ($($name:ident)*) => { $(
        #[repr(C)]
        #[derive(Debug)]
        pub(super) struct $name {
            _opaque: [u8; 0],
        }
    )* };
}

opaque! { Device }

/// `pthread_mutex_t`, of which only the size matters.
#[cfg(target_arch = "aarch64")]
type Mutex = [u64; 6];
#[cfg(not(target_arch = "aarch64"))]
type Mutex = [u64; 5];

type Unused<const N: usize> = [*const c_void; N];

/// `struct ibv_context`, with the part of its operations that has no other way in.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Context {
    pub(super) device: *mut Device,
    _control: Unused<11>,
    pub(super) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(super) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _queues: Unused<12>,
    pub(super) post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(super) post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _rest: Unused<5>,
    pub(super) cmd_fd: c_int,
    pub(super) async_fd: c_int,
    pub(super) num_comp_vectors: c_int,
    _mutex: Mutex,
    /// All ones: the operations in [`Extended`] are in front of this.
    pub(super) abi_compat: usize,
}

type AllocDm = unsafe extern "C" fn(*mut Context, *mut AllocDmAttr) -> *mut Dm;
type RegDmMr = unsafe extern "C" fn(*mut Pd, *mut Dm, u64, usize, c_uint) -> *mut Mr;
type QueryDeviceEx = unsafe extern "C" fn(*mut Context, *const c_void, *mut DeviceAttrEx, usize) -> c_int;

/// What lies in front of a context (`struct verbs_context`), as far as we need it. It grows upwards: `sz` says how far it
/// reaches.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Extended {
    pub(super) reg_dm_mr: Option<RegDmMr>,
    pub(super) alloc_dm: Option<AllocDm>,
    pub(super) free_dm: Option<unsafe extern "C" fn(*mut Dm) -> c_int>,
    _flows: Unused<17>,
    pub(super) query_device_ex: Option<QueryDeviceEx>,
    _old: Unused<11>,
    pub(super) sz: usize,
    pub(super) context: Context,
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct Pd {
    pub(super) context: *mut Context,
    handle: u32,
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct Mr {
    context: *mut Context,
    pd: *mut Pd,
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct Dm {
    context: *mut Context,
    pub(super) memcpy_to_dm: Option<unsafe extern "C" fn(*mut Dm, u64, *const c_void, usize) -> c_int>,
    memcpy_from_dm: *const c_void,
    comp_mask: u32,
    handle: u32,
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct AllocDmAttr {
    pub(super) length: usize,
    pub(super) log_align_req: u32,
    pub(super) comp_mask: u32,
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct CompChannel {
    context: *mut Context,
    pub(super) fd: c_int,
    refcnt: c_int,
}

/// `struct ibv_cq`, up to what we use.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
    channel: *mut CompChannel,
    cq_context: *mut c_void,
    handle: u32,
    pub(super) cqe: c_int,
}

/// `struct ibv_qp`, up to what we use.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    qp_context: *mut c_void,
    pd: *mut Pd,
    cqs: [*mut Cq; 2],
    srq: *mut c_void,
    handle: u32,
    pub(super) qp_num: u32,
}

#[repr(C)]
#[derive(Clone, Debug)]
pub(super) struct DeviceAttr {
    pub(super) fw_ver: [c_char; 64],
    pub(super) node_guid: u64,
    sys_image_guid: u64,
    pub(super) max_mr_size: u64,
    page_size_cap: u64,
    pub(super) vendor_id: u32,
    pub(super) vendor_part_id: u32,
    hw_ver: u32,
    pub(super) max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    device_cap_flags: c_uint,
    max_sge: c_int,
    max_sge_rd: c_int,
    max_cq: c_int,
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    max_pd: c_int,
    pub(super) max_qp_rd_atom: c_int,
    max_ee_rd_atom: c_int,
    max_res_rd_atom: c_int,
    pub(super) max_qp_init_rd_atom: c_int,
    max_ee_init_rd_atom: c_int,
    pub(super) atomic_cap: c_int,
    _rest: [c_int; 14],
    max_pkeys: u16,
    local_ca_ack_delay: u8,
    pub(super) phys_port_cnt: u8,
}

/// `struct ibv_device_attr_ex`: one field of it, and room for whatever it grows to.
#[repr(C, align(8))]
#[derive(Debug)]
pub(super) struct DeviceAttrEx {
    pub(super) bytes: [u8; 1024],
}

/// Where `max_dm_size` is in it, and what a library has to write for it to be there.
pub(super) const MAX_DM_SIZE_AT: usize = 376;

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct PortAttr {
    pub(super) state: c_uint,
    pub(super) max_mtu: c_uint,
    pub(super) active_mtu: c_uint,
    pub(super) gid_tbl_len: c_int,
    port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    _counters: [u32; 2],
    pkey_tbl_len: u16,
    pub(super) lid: u16,
    _switch: [u8; 7],
    pub(super) active_width: u8,
    pub(super) active_speed: u8,
    phys_state: u8,
    pub(super) link_layer: u8,
    flags: u8,
    port_cap_flags2: u16,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut c_void,
    pub(super) cap: QpCap,
    pub(super) qp_type: c_uint,
    pub(super) sq_sig_all: c_int,
}

#[repr(C, align(8))]
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct AhAttr {
    pub(super) dgid: [u8; 16],
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
    pub(super) _pad: u8,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct QpAttr {
    pub(super) qp_state: c_uint,
    pub(super) cur_qp_state: c_uint,
    pub(super) path_mtu: c_uint,
    pub(super) path_mig_state: c_uint,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: c_uint,
    pub(super) cap: QpCap,
    pub(super) ah_attr: AhAttr,
    pub(super) alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) _alternative: [u8; 2],
    pub(super) rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// `struct ibv_send_wr`; the union of what one-sided verbs need lies in `remote_addr` and the four fields after it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_uint,
    pub(super) send_flags: c_uint,
    imm_data: u32,
    pub(super) remote_addr: u64,
    /// An atomic's first operand; of READ and WRITE, the key (in its lower half).
    pub(super) compare_add_or_rkey: u64,
    pub(super) swap: u64,
    pub(super) atomic_rkey: u32,
    _qp_type: u64,
    _more: [u64; 6],
}

impl SendWr {
    pub(super) const fn zeroed() -> Self {
        Self {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
            opcode: 0,
            send_flags: 0,
            imm_data: 0,
            remote_addr: 0,
            compare_add_or_rkey: 0,
            swap: 0,
            atomic_rkey: 0,
            _qp_type: 0,
            _more: [0; 6],
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RecvWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut RecvWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: c_uint,
    pub(super) opcode: c_uint,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    imm_data: u32,
    pub(super) qp_num: u32,
    _rest: [u32; 4],
}

macro_rules! constants {
    ($($name:ident = $value:expr;)*) => { $(pub(super) const $name: c_uint = $value;)* };
}

constants! {
    ACCESS_LOCAL_WRITE = 1;
    ACCESS_REMOTE_WRITE = 2;
    ACCESS_REMOTE_READ = 4;
    ACCESS_REMOTE_ATOMIC = 8;
    ACCESS_ZERO_BASED = 32;
    WR_RDMA_WRITE = 0;
    WR_SEND = 2;
    WR_RDMA_READ = 4;
    WR_ATOMIC_CMP_AND_SWP = 5;
    WR_ATOMIC_FETCH_AND_ADD = 6;
    SEND_FENCE = 1;
    SEND_SIGNALED = 2;
    SEND_INLINE = 8;
    WC_SUCCESS = 0;
    WC_RECV = 128;
    QPT_RC = 2;
    QPS_INIT = 1;
    QPS_RTR = 2;
    QPS_RTS = 3;
    QPS_ERR = 6;
    QP_STATE = 1;
    QP_ACCESS_FLAGS = 1 << 3;
    QP_PKEY_INDEX = 1 << 4;
    QP_PORT = 1 << 5;
    QP_AV = 1 << 7;
    QP_PATH_MTU = 1 << 8;
    QP_TIMEOUT = 1 << 9;
    QP_RETRY_CNT = 1 << 10;
    QP_RNR_RETRY = 1 << 11;
    QP_RQ_PSN = 1 << 12;
    QP_MAX_QP_RD_ATOMIC = 1 << 13;
    QP_MIN_RNR_TIMER = 1 << 15;
    QP_SQ_PSN = 1 << 16;
    QP_MAX_DEST_RD_ATOMIC = 1 << 17;
    QP_DEST_QPN = 1 << 20;
    PORT_ACTIVE = 4;
    LINK_LAYER_ETHERNET = 2;
    ATOMIC_NONE = 0;
    ATOMIC_GLOB = 2;
}

// x86-64, where these were read off the header; other 64-bit systems lay out the same, but for the mutex.
const _: () = assert!(size_of::<usize>() == 8, "libibverbs is used on 64-bit systems only");
const _: () = assert!(size_of::<SendWr>() == 128 && size_of::<RecvWr>() == 32 && size_of::<Wc>() == 48);
const _: () =
    assert!(size_of::<QpAttr>() == 144 && size_of::<QpInitAttr>() == 64 && size_of::<AhAttr>() == 32);
const _: () =
    assert!(size_of::<Sge>() == 16 && size_of::<DeviceAttr>() == 232 && size_of::<PortAttr>() == 52);

macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The library's functions.
        #[derive(Debug)]
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn load() -> Result<Self, String> {
                // SAFETY: libibverbs' initialisers register its providers and do nothing else.
                let library = unsafe { Shared::new(LIBRARY) }.map_err(|error| error.to_string())?;
                // It stays loaded: its threads and providers outlive any value of ours.
                let library: &'static Shared = Box::leak(Box::new(library));
                Ok(Self { $(
                    // SAFETY: the symbol has this type in every version of libibverbs.so.1.
                    $name: *unsafe { library.get($symbol) }.map_err(|error| error.to_string())?,
                )* })
            }
        }
    };
}

functions! {
    get_device_list = b"ibv_get_device_list": fn(*mut c_int) -> *mut *mut Device;
    free_device_list = b"ibv_free_device_list": fn(*mut *mut Device);
    get_device_name = b"ibv_get_device_name": fn(*mut Device) -> *const c_char;
    open_device = b"ibv_open_device": fn(*mut Device) -> *mut Context;
    close_device = b"ibv_close_device": fn(*mut Context) -> c_int;
    query_device = b"ibv_query_device": fn(*mut Context, *mut DeviceAttr) -> c_int;
    query_port = b"ibv_query_port": fn(*mut Context, u8, *mut PortAttr) -> c_int;
    query_gid = b"ibv_query_gid": fn(*mut Context, u8, c_int, *mut [u8; 16]) -> c_int;
    alloc_pd = b"ibv_alloc_pd": fn(*mut Context) -> *mut Pd;
    dealloc_pd = b"ibv_dealloc_pd": fn(*mut Pd) -> c_int;
    reg_mr = b"ibv_reg_mr": fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    dereg_mr = b"ibv_dereg_mr": fn(*mut Mr) -> c_int;
    create_comp_channel = b"ibv_create_comp_channel": fn(*mut Context) -> *mut CompChannel;
    destroy_comp_channel = b"ibv_destroy_comp_channel": fn(*mut CompChannel) -> c_int;
    create_cq = b"ibv_create_cq": fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    destroy_cq = b"ibv_destroy_cq": fn(*mut Cq) -> c_int;
    get_cq_event = b"ibv_get_cq_event": fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ack_cq_events = b"ibv_ack_cq_events": fn(*mut Cq, c_uint);
    create_qp = b"ibv_create_qp": fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    modify_qp = b"ibv_modify_qp": fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    destroy_qp = b"ibv_destroy_qp": fn(*mut Qp) -> c_int;
}

/// The library, loaded when it is first asked for; or why it cannot be.
pub(super) fn library() -> Result<&'static Library, String> {
    static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
    LOADED.get_or_init(Library::load).as_ref().map_err(Clone::clone)
}

#[cfg(test)]
mod tests;
