/** Where the relay listens inside a sandbox. */
export const PROXY_PORT = 3128;

const PROXY = `http://127.0.0.1:${PROXY_PORT}`;
const OWN = 'localhost,127.0.0.1,::1';

/** Variables by which programs inside find the proxy. Most read one spelling or the other. */
export const proxyEnvironment: Readonly<Record<string, string>> = {
  HTTP_PROXY: PROXY,
  http_proxy: PROXY,
  HTTPS_PROXY: PROXY,
  https_proxy: PROXY,
  ALL_PROXY: PROXY,
  all_proxy: PROXY,
  NO_PROXY: OWN,
  no_proxy: OWN,
  // Node's fetch reads the variables above only then.
  NODE_USE_ENV_PROXY: '1',
};
