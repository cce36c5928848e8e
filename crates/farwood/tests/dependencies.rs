//! The rules of dependency, checked: data flows one way, and only `fabric` may be unsafe.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What each crate may depend on, of ours, outside its tests. A crate that is not listed has no place in the architecture.
const ALLOWED: &[(&str, &[&str])] = &[
    ("fabric", &[]),
    ("workload", &[]),
    ("memory", &["fabric"]),
    ("index", &["fabric"]),
    ("sim", &["fabric", "index", "memory", "workload"]),
    ("gateway", &["fabric", "index", "memory", "workload"]),
    ("farwood", &["fabric", "index", "memory", "workload", "sim", "gateway"]),
];

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("crates live side by side").to_owned()
}

/// Our crates with the text of their manifests.
fn manifests() -> BTreeMap<String, String> {
    let folders = std::fs::read_dir(crates()).expect("the crates are there");
    let manifest = |folder: std::fs::DirEntry| {
        let text = std::fs::read_to_string(folder.path().join("Cargo.toml")).ok()?;
        Some((folder.file_name().to_string_lossy().into_owned(), text))
    };
    folders.filter_map(|folder| manifest(folder.ok()?)).collect()
}

/// Our crates that a section of a manifest names.
fn named(manifest: &str, section: &str) -> Vec<String> {
    let body = manifest.split_once(section).map_or("", |(_, rest)| rest.split("\n[").next().unwrap_or(""));
    body.lines()
        .filter_map(|line| line.strip_prefix("farwood-"))
        .map(|line| first_word(line).to_owned())
        .collect()
}

fn first_word(line: &str) -> &str {
    line.split(['.', ' ', '=']).next().unwrap_or("")
}

#[test]
fn crates_depend_in_one_direction() {
    let manifests = manifests();
    assert!(manifests.len() >= 5, "found only {:?}", manifests.keys());
    for (name, manifest) in &manifests {
        let rule = ALLOWED.iter().find(|(rule, _)| rule == name);
        let (_, allowed) =
            rule.unwrap_or_else(|| panic!("crate '{name}' has no place in the rules of dependency"));
        for dependency in named(manifest, "[dependencies]") {
            assert!(allowed.contains(&dependency.as_str()), "'{name}' must not depend on '{dependency}'");
        }
    }
}

#[test]
fn the_rule_can_be_broken() {
    let manifest = "[dependencies]\nfarwood-sim.workspace = true\nserde = \"1\"\n\n[dev-dependencies]\nfarwood-memory.workspace = true\n";
    assert_eq!(named(manifest, "[dependencies]"), ["sim"]);
    assert_eq!(named(manifest, "[dev-dependencies]"), ["memory"]);
}

#[test]
fn only_the_fabric_is_unsafe() {
    for name in manifests().keys().filter(|name| *name != "fabric") {
        for root in ["lib.rs", "main.rs"] {
            if let Ok(text) = std::fs::read_to_string(crates().join(name).join("src").join(root)) {
                assert!(
                    text.contains("#![forbid(unsafe_code)]"),
                    "{name}/src/{root} does not forbid unsafe code"
                );
            }
        }
    }
}

/// In `fabric` itself, unsafe code stays in the modules that were made for it.
#[test]
fn unsafe_code_stays_in_its_modules() {
    fn sources() -> PathBuf {
        crates().join("fabric/src")
    }
    fn walk(folder: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).expect("a folder of sources").flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, found);
            } else if std::fs::read_to_string(&path)
                .is_ok_and(|text| text.contains("unsafe {") || text.contains("unsafe impl"))
            {
                found.push(path.strip_prefix(sources()).expect("inside").display().to_string());
            }
        }
    }
    let mut found = Vec::new();
    walk(&sources(), &mut found);
    found.sort();
    let verbs = ["device", "loopback", "mailbox", "memory", "queue", "sender", "sys"]
        .map(|name| format!("transport/verbs/{name}.rs"));
    let allowed = ["buf.rs", "mem.rs", "pages.rs", "transport/sim/bound.rs"].map(str::to_owned);
    assert_eq!(found, [&allowed[..], &verbs].concat());
}
