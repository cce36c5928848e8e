//! What goes wrong is said in one clear line.

use super::world::{Folder, farwood, serve};
use farwood_fabric::transport::shm::{ShmCluster, ShmOptions, VERSION};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

/// Runs a server that has to fail; its one line.
fn refused(command: &mut Command) -> String {
    let Output { status, stderr, stdout } = command.output().expect("it runs");
    let said = String::from_utf8(stderr).expect("text");
    assert_eq!(status.code(), Some(2), "{said}");
    assert!(stdout.is_empty() && said.lines().count() == 1, "{said}");
    said
}

fn server(socket: &Path) -> Command {
    let mut command = farwood();
    command.args(["serve", "--memory", "16MiB", "--shm"]).arg(socket);
    command
}

/// Why a client cannot connect.
fn unreachable(socket: &Path, token: &[u8]) -> String {
    let options = ShmOptions { token: token.to_vec() };
    let refused = ShmCluster::connect(&[socket.to_owned()], &options);
    let said = refused.expect_err("it cannot connect").to_string();
    assert!(said.lines().count() == 1 && said.contains(&socket.display().to_string()), "{said}");
    said
}

#[test]
fn two_servers_on_one_path() {
    let folder = Folder::new();
    let socket = folder.0.join("one.sock");
    let first = serve(&socket, &[]);
    let said = refused(&mut server(&socket));
    assert!(said.contains("another server already listens at") && said.contains("one.sock"), "{said}");
    assert!(ShmCluster::connect(&[socket], &ShmOptions::default()).is_ok(), "the first one is not disturbed");
    drop(first);
}

#[test]
fn a_stale_socket() {
    let folder = Folder::new();
    let socket = folder.0.join("stale.sock");
    assert!(unreachable(&socket, b"").contains("there is no socket"));
    serve(&socket, &[]).kill();
    assert!(socket.exists(), "a killed server cannot clean up");
    assert!(unreachable(&socket, b"").contains("the server that made"));
    let again = serve(&socket, &[]);
    assert!(ShmCluster::connect(std::slice::from_ref(&socket), &ShmOptions::default()).is_ok());
    drop(again);
    std::fs::remove_file(&socket).unwrap();
    std::fs::write(&socket, "precious").unwrap();
    assert!(refused(&mut server(&socket)).contains("exists and is not a socket"));
    assert_eq!(std::fs::read(&socket).unwrap(), b"precious");
}

#[test]
fn a_path_without_permission() {
    let folder = Folder::new();
    let closed = folder.0.join("closed");
    std::fs::create_dir(&closed).unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o555)).unwrap();
    let mut command = server(&closed.join("m.sock"));
    if rustix::process::getuid().is_root() {
        // Root may do anything, so somebody else tries, who needs to reach the binary.
        let binary = folder.0.join("farwood");
        std::fs::copy(env!("CARGO_BIN_EXE_farwood"), &binary).unwrap();
        std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o755)).unwrap();
        command = Command::new(binary);
        command.args(["serve", "--memory", "16MiB", "--shm"]).arg(closed.join("m.sock")).uid(65534);
    }
    let said = refused(&mut command);
    assert!(said.contains("no permission to make the socket"), "{said}");
    assert!(refused(&mut server(&folder.0.join("no/such/m.sock"))).contains("there is no folder"));
    let long = folder.0.join("x".repeat(120));
    assert!(refused(&mut server(&long)).contains("too long for a socket"));
}

#[test]
fn another_version() {
    let folder = Folder::new();
    // A server of the next version greets us.
    let socket = folder.0.join("next.sock");
    let next = UnixListener::bind(&socket).unwrap();
    let mut greeting = b"FARWOOD\x01".to_vec();
    greeting.extend((VERSION + 1).to_le_bytes());
    greeting.extend(7u64.to_le_bytes());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut client, _) = next.accept().unwrap();
            client.write_all(&greeting).unwrap();
            let _ = client.read(&mut [0; 64]);
        });
        let said = unreachable(&socket, b"");
        let versions =
            format!("speaks version {} of the shm protocol and this farwood version {VERSION}", VERSION + 1);
        assert!(said.contains(&versions), "{said}");
    });
    // A client of the next version says hello.
    let socket = folder.0.join("this.sock");
    let server = serve(&socket, &[]);
    let mut client = UnixStream::connect(&socket).unwrap();
    let mut hello = [0; 20];
    client.read_exact(&mut hello).unwrap();
    hello[8..12].copy_from_slice(&(VERSION + 1).to_le_bytes());
    client.write_all(&hello).unwrap();
    client.write_all(&[0; 8]).unwrap();
    let mut said = Vec::new();
    client.read_to_end(&mut said).unwrap();
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("use the same farwood on both sides"), "{said}");
    drop(server);
}

#[test]
fn tokens_and_strangers() {
    let folder = Folder::new();
    let (socket, token) = (folder.0.join("m.sock"), folder.0.join("token"));
    std::fs::write(&token, "open sesame\n").unwrap();
    let mut server = serve(&socket, &["--token-file", token.to_str().unwrap()]);
    assert!(unreachable(&socket, b"").contains("the token is wrong"));
    assert!(unreachable(&socket, b"open says me").contains("the token is wrong"));
    let right = ShmOptions { token: b"open sesame".to_vec() };
    assert!(ShmCluster::connect(std::slice::from_ref(&socket), &right).is_ok());
    let mut stranger = UnixStream::connect(&socket).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\nHost: somewhere\r\n").unwrap();
    let mut said = Vec::new();
    stranger.read_to_end(&mut said).unwrap();
    assert!(String::from_utf8_lossy(&said).contains("this is a Farwood memory server"));
    server.signal(Signal::TERM);
    assert!(server.0.wait().unwrap().success());
    assert_eq!(folder.names(), ["token"], "a clean stop leaves nothing behind");
}

#[test]
fn pools_that_do_not_fit_together() {
    let folder = Folder::new();
    let (a, b) = (folder.0.join("a.sock"), folder.0.join("b.sock"));
    let servers = [serve(&a, &[]), serve(&b, &[])];
    let strangers = ShmCluster::connect(&[a.clone(), b], &ShmOptions::default());
    assert!(strangers.unwrap_err().to_string().contains("check the pool's URL"));
    assert!(refused(server(&folder.0.join("c.sock")).args(["--servers", "2"])).contains("--pool"));
    drop(servers);
}
