//! Compares our declarations with the C header, where a compiler and `libibverbs-dev` are installed; elsewhere it says so.

use super::*;
use std::mem::offset_of;
use std::process::Command;

/// Expressions in C, with what we believe they are.
fn beliefs() -> Vec<(String, usize)> {
    let mut beliefs = Vec::new();
    let mut believe = |expression: &str, value: usize| beliefs.push((expression.to_owned(), value));
    macro_rules! offsets {
        ($($rust:ident = $c:literal { $($field:ident: $path:literal),* $(,)? })*) => { $($(
            believe(concat!("offsetof(struct ", $c, ", ", $path, ")"), offset_of!($rust, $field));
        )*)* };
    }
    offsets! {
        Context = "ibv_context" {
            poll_cq: "ops.poll_cq", req_notify_cq: "ops.req_notify_cq", post_send: "ops.post_send",
            post_recv: "ops.post_recv", cmd_fd: "cmd_fd", async_fd: "async_fd", num_comp_vectors: "num_comp_vectors",
            abi_compat: "abi_compat",
        }
        Pd = "ibv_pd" { context: "context" }
        Mr = "ibv_mr" { addr: "addr", length: "length", lkey: "lkey", rkey: "rkey" }
        Dm = "ibv_dm" { memcpy_to_dm: "memcpy_to_dm" }
        AllocDmAttr = "ibv_alloc_dm_attr" { length: "length", log_align_req: "log_align_req", comp_mask: "comp_mask" }
        CompChannel = "ibv_comp_channel" { fd: "fd" }
        Cq = "ibv_cq" { context: "context", cqe: "cqe" }
        Qp = "ibv_qp" { context: "context", qp_num: "qp_num" }
        DeviceAttr = "ibv_device_attr" {
            node_guid: "node_guid", max_mr_size: "max_mr_size", vendor_id: "vendor_id", vendor_part_id: "vendor_part_id",
            max_qp: "max_qp", max_qp_wr: "max_qp_wr", max_cqe: "max_cqe", max_mr: "max_mr",
            max_qp_rd_atom: "max_qp_rd_atom", max_qp_init_rd_atom: "max_qp_init_rd_atom", atomic_cap: "atomic_cap",
            phys_port_cnt: "phys_port_cnt",
        }
        PortAttr = "ibv_port_attr" {
            state: "state", max_mtu: "max_mtu", active_mtu: "active_mtu", gid_tbl_len: "gid_tbl_len",
            max_msg_sz: "max_msg_sz", lid: "lid", active_width: "active_width", active_speed: "active_speed",
            link_layer: "link_layer",
        }
        QpCap = "ibv_qp_cap" {
            max_send_wr: "max_send_wr", max_recv_wr: "max_recv_wr", max_send_sge: "max_send_sge",
            max_recv_sge: "max_recv_sge", max_inline_data: "max_inline_data",
        }
        QpInitAttr = "ibv_qp_init_attr" {
            qp_context: "qp_context", send_cq: "send_cq", recv_cq: "recv_cq", srq: "srq", cap: "cap", qp_type: "qp_type",
            sq_sig_all: "sq_sig_all",
        }
        AhAttr = "ibv_ah_attr" {
            dgid: "grh.dgid", sgid_index: "grh.sgid_index", hop_limit: "grh.hop_limit", dlid: "dlid",
            is_global: "is_global", port_num: "port_num",
        }
        QpAttr = "ibv_qp_attr" {
            qp_state: "qp_state", path_mtu: "path_mtu", rq_psn: "rq_psn", sq_psn: "sq_psn", dest_qp_num: "dest_qp_num",
            qp_access_flags: "qp_access_flags", ah_attr: "ah_attr", pkey_index: "pkey_index",
            max_rd_atomic: "max_rd_atomic", max_dest_rd_atomic: "max_dest_rd_atomic", min_rnr_timer: "min_rnr_timer",
            port_num: "port_num", timeout: "timeout", retry_cnt: "retry_cnt", rnr_retry: "rnr_retry",
        }
        Sge = "ibv_sge" { addr: "addr", length: "length", lkey: "lkey" }
        SendWr = "ibv_send_wr" {
            wr_id: "wr_id", next: "next", sg_list: "sg_list", num_sge: "num_sge", opcode: "opcode",
            send_flags: "send_flags", remote_addr: "wr.rdma.remote_addr", remote_addr: "wr.atomic.remote_addr",
            compare_add_or_rkey: "wr.rdma.rkey", compare_add_or_rkey: "wr.atomic.compare_add", swap: "wr.atomic.swap",
            atomic_rkey: "wr.atomic.rkey",
        }
        RecvWr = "ibv_recv_wr" { wr_id: "wr_id", next: "next", sg_list: "sg_list", num_sge: "num_sge" }
        Wc = "ibv_wc" {
            wr_id: "wr_id", status: "status", opcode: "opcode", vendor_err: "vendor_err", byte_len: "byte_len",
            qp_num: "qp_num",
        }
    }
    // The extended context grows upwards, so what counts is how far things lie in front of the plain one.
    let in_front = |at: usize| offset_of!(Extended, context) - at;
    for (field, ours) in [
        ("reg_dm_mr", in_front(offset_of!(Extended, reg_dm_mr))),
        ("alloc_dm", in_front(offset_of!(Extended, alloc_dm))),
        ("free_dm", in_front(offset_of!(Extended, free_dm))),
        ("query_device_ex", in_front(offset_of!(Extended, query_device_ex))),
        ("sz", in_front(offset_of!(Extended, sz))),
    ] {
        let path =
            format!("offsetof(struct verbs_context, context) - offsetof(struct verbs_context, {field})");
        believe(&path, ours);
    }
    believe("offsetof(struct ibv_device_attr_ex, max_dm_size)", MAX_DM_SIZE_AT);
    macro_rules! sizes {
        ($($rust:ident = $c:literal)*) => { $(believe(concat!("sizeof(struct ", $c, ")"), size_of::<$rust>());)* };
    }
    sizes! {
        SendWr = "ibv_send_wr" RecvWr = "ibv_recv_wr" Wc = "ibv_wc" QpAttr = "ibv_qp_attr"
        QpInitAttr = "ibv_qp_init_attr" AhAttr = "ibv_ah_attr" Sge = "ibv_sge" DeviceAttr = "ibv_device_attr"
        PortAttr = "ibv_port_attr" Context = "ibv_context"
    }
    macro_rules! numbers {
        ($($ours:ident)*) => { $(believe(concat!("IBV_", stringify!($ours)), $ours as usize);)* };
    }
    numbers! {
        ACCESS_LOCAL_WRITE ACCESS_REMOTE_WRITE ACCESS_REMOTE_READ ACCESS_REMOTE_ATOMIC ACCESS_ZERO_BASED
        WR_RDMA_WRITE WR_SEND WR_RDMA_READ WR_ATOMIC_CMP_AND_SWP WR_ATOMIC_FETCH_AND_ADD
        SEND_FENCE SEND_SIGNALED SEND_INLINE WC_SUCCESS WC_RECV QPT_RC QPS_INIT QPS_RTR QPS_RTS
        QP_STATE QP_ACCESS_FLAGS QP_PKEY_INDEX QP_PORT QP_AV QP_PATH_MTU QP_TIMEOUT QP_RETRY_CNT QP_RNR_RETRY QP_RQ_PSN
        QP_MAX_QP_RD_ATOMIC QP_MIN_RNR_TIMER QP_SQ_PSN QP_MAX_DEST_RD_ATOMIC QP_DEST_QPN PORT_ACTIVE LINK_LAYER_ETHERNET
        ATOMIC_NONE ATOMIC_GLOB
    }
    beliefs
}

#[test]
fn our_declarations_are_those_of_the_c_header() {
    let folder = std::env::temp_dir().join(format!("farwood-verbs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, program) = (folder.join("offsets.c"), folder.join("offsets"));
    let beliefs = beliefs();
    let prints: Vec<String> =
        beliefs.iter().map(|(c, _)| format!("printf(\"%zu\\n\", (size_t)({c}));")).collect();
    let prints = prints.join("\n");
    let includes = "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\n";
    std::fs::write(&source, format!("{includes}int main(void) {{\n{prints}\nreturn 0;\n}}\n")).unwrap();
    let compiled = Command::new("cc").arg(&source).arg("-o").arg(&program).output();
    let has_header = compiled.is_ok_and(|output| {
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() || said.contains("infiniband/verbs.h: No such file"), "{said}");
        output.status.success()
    });
    if has_header {
        let said = Command::new(&program).output().unwrap();
        let values: Vec<usize> =
            String::from_utf8(said.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(values.len(), beliefs.len());
        for ((expression, ours), theirs) in beliefs.iter().zip(values) {
            assert_eq!(*ours, theirs, "{expression}");
        }
    } else {
        println!("skipped: needs a C compiler and libibverbs-dev");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
