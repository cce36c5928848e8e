//! What `up --path` notices of a folder whose files do not belong together, and what `--accept-torn` makes of it.

use super::world::{Folder, Running, binary};
use rustix::process::Signal;

fn start(kept: &Folder, lines: usize, more: &[&str], temporary: &Folder) -> Running {
    let usual = ["up", "--path", kept.text(), "--listen", "127.0.0.1:0"];
    let mut running = Running::start(&[&usual, more].concat(), lines, temporary);
    let port = running.lines[3].split("-p ").nth(1).and_then(|rest| rest.split(' ').next());
    running.port = port.and_then(|port| port.parse().ok()).expect("a port");
    running
}

fn end(mut up: Running) {
    up.signal(Signal::TERM);
    assert!(up.wait().success(), "{}", up.complaints());
}

fn refusal(kept: &Folder, temporary: &Folder) -> String {
    let mut up = binary();
    up.args(["up", "--path", kept.text(), "--listen", "127.0.0.1:0"]).env("TMPDIR", temporary.text());
    let output = up.output().expect("it runs");
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn files_that_do_not_belong_together_are_refused() {
    let (temporary, kept) = (Folder::new(), Folder::new());
    let up = start(&kept, 5, &["--memory", "64MiB", "--servers", "2"], &temporary);
    assert_eq!(up.client().say("set a 1"), "OK");
    end(up);
    let file = kept.0.join("m1.memory");
    let before = std::fs::read(&file).expect("the memory");
    let up = start(&kept, 5, &[], &temporary);
    assert_eq!(up.client().say("set b 2"), "OK");
    // A copy of memory that is in use, to be put in the place of what was closed.
    let in_use = std::fs::read(&file).expect("the memory");
    end(up);
    let closed = std::fs::read(&file).expect("the memory");

    std::fs::write(&file, &before).expect("written");
    let said = refusal(&kept, &temporary);
    let expected = ["copy of opening 1", "last was 2", "put a copy of it back", "--accept-torn", kept.text()];
    assert!(expected.iter().all(|words| said.contains(words)), "{said}");
    std::fs::write(&file, &in_use).expect("written");
    let said = refusal(&kept, &temporary);
    assert!(said.contains("a copy made while a server used it"), "{said}");
    std::fs::remove_file(&file).expect("it is there");
    let said = refusal(&kept, &temporary);
    assert!(said.contains("it is empty") && said.contains("--accept-torn"), "{said}");

    // What was refused has changed nothing.
    std::fs::write(&file, &closed).expect("written");
    let up = start(&kept, 5, &[], &temporary);
    assert_eq!((up.client().say("GET a"), up.client().say("GET b")), ("1".to_owned(), "2".to_owned()));
    end(up);

    std::fs::write(&file, &before).expect("written");
    let up = start(&kept, 6, &["--accept-torn"], &temporary);
    let torn = &up.lines[5];
    assert!(
        torn.contains("torn     memory server 1") && torn.contains("farwood check --repair shm://"),
        "{torn}"
    );
    // Whatever it finds, it answers.
    let _ = (up.client().say("GET a"), up.client().say("set c 3"));
    end(up);
    let up = start(&kept, 6, &[], &temporary);
    assert!(up.lines[5].contains("torn"), "it says so for as long as it is used: {:?}", up.lines);
    end(up);
}
